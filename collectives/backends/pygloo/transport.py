"""pygloo as a transport: the commands that a rank gives to its helper process.

All data go through the memory of both processes, in pieces of at most PIECE bytes. The ring of Gloo does the reductions
that it computes exactly, as with torch's binding.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.api import DType, HorovodInternalError, ReduceOp, ShutDownError, override
from collectives.backends.base import Group
from collectives.backends.gloo.library import GLOO_NAMES, disconnected, is_exact, timed_out, translate
from collectives.backends.host import Array, Bytes
from collectives.backends.pygloo.process import Helper
from collectives.backends.transport import Message, PointToPoint


class Transfer(NamedTuple):
    """``length`` bytes of the shared memory from ``offset`` on, to or from the member at position ``peer``."""

    peer: int
    is_send: bool
    offset: int
    length: int


def in_order(transfers: Iterable[Transfer], position: int, size: int) -> list[Transfer]:
    """The ``transfers`` of the member at ``position``, in an order in which no ``size`` members block one another.

    The members i and j meet in round (i + j) mod ``size``, so that each has one partner in a round. In a round, the
    member with the lower position sends first. This is one order for all transfers of the group, so there is always one
    that both of its members have reached. All to all takes ``size`` rounds of two messages.
    """

    def place(transfer: Transfer) -> tuple[int, bool]:
        is_of_lower = transfer.is_send == (position < transfer.peer)
        return (position + transfer.peer) % size, not is_of_lower

    return sorted(transfers, key=place)


PIECE = 1 << 24
SMALLEST_PIECE = 1 << 16
SLICE_MILLISECONDS = 50
SMALL = 1 << 19
"""Up to this many bytes for a member, all get everything: one allgather takes half the time of 2 P messages in turn."""


class PyglooTransport(PointToPoint):
    """A member of ``group``, with the connected ``helper``, which it owns.

    ``timeout`` bounds the time of one piece, in seconds. Gloo has a limit of 30 s, which pygloo cannot change.
    """

    name = "pygloo"

    def __init__(self, group: Group, helper: Helper, timeout: float) -> None:
        super().__init__(group)
        self._helper = helper
        self._timeout = timeout
        self._poller = select.poll()
        self._poller.register(helper.fileno(), select.POLLIN)

    @override
    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Two messages in each of P rounds, see :func:`in_order`."""
        self.check()
        step = max(PIECE // self.group.size, SMALLEST_PIECE)
        longest = max([data.size for _, data in (*outgoing, *incoming)], default=0)
        for start in range(0, longest, step):
            self._exchange_pieces(_cut(outgoing, start, step), _cut(incoming, start, step))

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """Equal parts of SMALL bytes in all by an allgather: P - 1 steps, (P - 1) S bytes."""
        size = self.group.size
        if send_counts or receive_counts or source.size * size > SMALL:
            super().alltoall(source, destination, send_counts, receive_counts)
            return
        everything = np.empty(source.size * size, np.uint8)
        self.allgather(source, everything)
        rows = everything.reshape(size, size, source.size // size)
        destination.reshape(size, source.size // size)[:] = rows[:, self.group.position]

    @override
    def allgather(self, source: Bytes, destination: Bytes) -> None:
        """A ring: P - 1 steps, (P - 1) S bytes."""
        self.check()
        size, step = self.group.size, max(PIECE // self.group.size, SMALLEST_PIECE)
        rows = destination.reshape(size, source.size)
        for start in range(0, source.size, step):
            piece = source[start : start + step]
            memory = self._memory(piece.size * (size + 1))
            memory[: piece.size] = piece
            self._run("allgather", 0, piece.size, piece.size, size)
            rows[:, start : start + step] = memory[piece.size :].reshape(size, piece.size)

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        """A tree: log2 P steps, S log2 P bytes at the root."""
        self.check()
        for start in range(0, data.size, PIECE):
            piece = data[start : start + PIECE]
            memory = self._memory(piece.size)
            if self.group.position == root:
                memory[:] = piece
            self._run("broadcast", 0, piece.size, root)
            if self.group.position != root:
                piece[:] = memory

    @override
    def barrier(self) -> None:
        self.check()
        self._run("barrier")

    @override
    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        return is_exact(dtype, op)

    @override
    def allreduce(self, array: Array, op: ReduceOp) -> None:
        """A ring: 2 (P - 1) steps, 2 S (P - 1) / P bytes."""
        self.check()
        step = PIECE // array.itemsize
        for start in range(0, array.size, step):
            piece = array[start : start + step]
            memory = self._memory(piece.nbytes).view(piece.dtype)
            memory[:] = piece
            self._run("allreduce", piece.nbytes, piece.size, piece.dtype.name, GLOO_NAMES[op])
            piece[:] = memory

    @override
    def close(self) -> None:
        self._end(ShutDownError("the pygloo backend was closed"))
        self._helper.close()

    @override
    def abort(self, error: Exception) -> None:
        with self._error_lock:
            self._error = error
        self._helper.kill()

    def _exchange_pieces(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        memory = self._memory(sum([data.size for _, data in (*outgoing, *incoming)]))
        transfers: list[Transfer] = []
        offset = 0
        for is_send, messages in ((True, outgoing), (False, incoming)):
            for peer, data in messages:
                transfers.append(Transfer(peer, is_send, offset, data.size))
                if is_send:
                    memory[offset : offset + data.size] = data
                offset += data.size
        self._run("exchange", in_order(transfers, self.group.position, self.group.size))
        for transfer, (_, data) in zip(transfers[len(outgoing) :], incoming, strict=True):
            data[:] = memory[transfer.offset : transfer.offset + transfer.length]

    def _memory(self, nbytes: int) -> Bytes:
        return np.frombuffer(self._helper.memory(nbytes), np.uint8, nbytes)

    def _run(self, *command: Any) -> None:
        """Let the helper process do ``command``, and wait for it."""
        try:
            self._helper.tell(*command)
            self._wait()
            answer, *text = self._helper.hear()
        except (EOFError, OSError) as error:
            ended = HorovodInternalError("the helper process of pygloo on this rank has ended; form a new job")
            raise self._fail(ended) from error
        if answer != "done":
            raise self._fail(translate(RuntimeError(*text), self.group))
        self.check()

    def _wait(self) -> None:
        """Wait for the answer, at most for the timeout; :meth:`abort` ends the process, and so the wait."""
        deadline = time.monotonic() + self._timeout
        while not self._poller.poll(SLICE_MILLISECONDS):
            self.on_wait()
            if self._helper.has_lost_connection() and not self._poller.poll(SLICE_MILLISECONDS):
                raise self._fail(disconnected(self.group))
            if time.monotonic() > deadline:
                raise self._fail(timed_out(self.group, f"a piece has not arrived within {self._timeout:g} s"))

    def _fail(self, error: Exception) -> Exception:
        """The error that this and all later calls raise. Disconnects the peers, so that they do not wait in vain."""
        first = self._end(error)
        self._helper.kill()
        return first


def _cut(messages: Sequence[Message], start: int, step: int) -> list[Message]:
    """The part of each message that begins at ``start``; no empty ones."""
    return [(peer, data[start : start + step]) for peer, data in messages if data.size > start]
