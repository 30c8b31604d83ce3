"""MPI as a transport: calls that do not block, and waits that can be aborted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from collectives.api import DType, EngineError, PeerLostError, ReduceOp, ShutDownError, override
from collectives.backends.base import Group
from collectives.backends.host import Array, Bytes
from collectives.backends.mpi.communicators import poll
from collectives.backends.mpi.library import spoil, start_mpi, suspect, turn_of
from collectives.backends.transport import Message, PointToPoint

LARGEST = 1 << 26
"""Bytes of a message. MPI counts up to 2^31, and a wait sees that it goes on by the messages that have ended."""
MOST_COUNTED = 2**31 - 1
TAG = 1
OPEN_MPI = "Open MPI"
LOOK_SECONDS = 0.05

_OPS = {ReduceOp.SUM: "SUM", ReduceOp.PRODUCT: "PROD", ReduceOp.MIN: "MIN", ReduceOp.MAX: "MAX"}
_FLOAT_OPS = (ReduceOp.SUM, ReduceOp.PRODUCT)
_FLOATS = (DType.FLOAT32, DType.FLOAT64)
_BUGS = ("ERR_BUFFER", "ERR_COUNT", "ERR_TYPE", "ERR_TAG", "ERR_COMM", "ERR_OP", "ERR_ARG", "ERR_TRUNCATE")


class MpiTransport(PointToPoint):
    """A member of ``group``, with the ``communicator`` of its members, which it owns.

    ``timeout`` bounds how long an operation may go on without the end of any message, in seconds.
    """

    name = "mpi"

    def __init__(self, group: Group, communicator: Any, timeout: float) -> None:
        super().__init__(group)
        self._mpi = start_mpi(timeout)
        self._turn = turn_of(self._mpi)
        self._communicator = communicator
        self._timeout = timeout
        self._unfinished: list[tuple[Any, ...]] = []
        self._is_slow_between_hosts = _is_slow_between_hosts(self._mpi, group)

    @override
    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        mpi, communicator = self._mpi, self._communicator
        receives = [(piece, source) for source, data in incoming for piece in _pieces(data)]
        sends = [(piece, target) for target, data in outgoing for piece in _pieces(data)]
        self._run(
            lambda: [
                *(communicator.Irecv([piece, mpi.BYTE], source, TAG) for piece, source in receives),
                *(communicator.Isend([piece, mpi.BYTE], target, TAG) for piece, target in sends),
            ],
            receives,
            sends,
        )

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """Equal parts as MPI does it, as far as it can count; others by messages.

        All members must call the same of MPI, and with counts a member does not know how many bytes others have.
        """
        if send_counts or source.size > MOST_COUNTED:
            super().alltoall(source, destination, send_counts, receive_counts)
            return
        outgoing, incoming = [source, self._mpi.BYTE], [destination, self._mpi.BYTE]
        self._run(lambda: [self._communicator.Ialltoall(outgoing, incoming)], outgoing, incoming)

    @override
    def barrier(self) -> None:
        self._run(lambda: [self._communicator.Ibarrier()])

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        """As MPI does it, in pieces."""
        self._run(lambda: [self._communicator.Ibcast([piece, self._mpi.BYTE], root) for piece in _pieces(data)], data)

    @override
    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """MPI has no 16-bit floats, and may drop NaN from MIN and MAX."""
        if self._is_slow_between_hosts:
            return False
        return op in (_OPS if dtype.is_integer else _FLOAT_OPS if dtype in _FLOATS else ())

    @override
    def allreduce(self, array: Array, op: ReduceOp) -> None:
        """As MPI does it, in pieces."""
        mpi, combine = self._mpi, getattr(self._mpi, _OPS[op])
        self._run(
            lambda: [self._communicator.Iallreduce(mpi.IN_PLACE, piece, combine) for piece in _pieces(array)], array
        )

    @override
    def close(self) -> None:
        """The communicator of an operation that is not over stays."""
        is_sound = self._error is None
        self._error = ShutDownError("the mpi backend was closed")  # the traceback of another error may hold memory
        communicator, self._communicator = self._communicator, None
        if communicator is not None and is_sound and not self._mpi.Is_finalized():
            communicator.Free()

    @override
    def abort(self, error: Exception) -> None:
        self._fail(error)

    def _run(self, begin: Callable[[], list[Any]], *memory: object) -> None:
        """Begin requests and wait for all of them; until then ``memory`` is theirs."""
        self.check()
        requests: list[Any] = []
        try:
            with self._turn:
                requests += begin()
            self._wait(requests)
        except BaseException as error:
            reason = self._fail(self._translated(error))
            self._unfinished.append((requests, memory))
            spoil(reason)
            if reason is error or not isinstance(error, Exception):
                raise
            raise reason from error

    def _wait(self, requests: list[Any]) -> None:
        """Until the timeout has gone by without the end of a request."""
        left, told, ended = len(requests), 0.0, 0.0
        is_new = False

        def is_over() -> bool:
            nonlocal left, is_new
            with self._turn:
                done = self._mpi.Request.Testsome(requests)
            is_new = bool(done)
            left -= len(done or ())
            return left == 0

        def look(waited: float) -> None:
            nonlocal told, ended
            self.check()
            if is_new:
                ended = waited
            if waited - told > LOOK_SECONDS:
                told = waited
                self.on_wait()
            if waited - ended > self._timeout:
                text = f"did not answer in time (no message of MPI has ended for {waited - ended:.1f} s)"
                raise self.group.late(text)

        poll(is_over, look)

    def _translated(self, error: BaseException) -> Exception:
        if not isinstance(error, self._mpi.Exception):
            return (
                error
                if isinstance(error, Exception)
                else EngineError(f"an operation of MPI was interrupted: {error!r}")
            )
        kind = error.Get_error_class()
        if any(kind == getattr(self._mpi, name) for name in _BUGS):
            return EngineError(f"MPI refused an operation; report this ({error})")
        text = f"MPI failed in an operation with {self.group.some_others()}; form a new job ({error})"
        return PeerLostError(text)

    def _fail(self, error: Exception) -> Exception:
        """The error that this and all later calls raise."""
        first = self._end(error)
        suspect(str(first))
        return first


def _is_slow_between_hosts(mpi: Any, group: Group) -> bool:
    """Whether MPI's allreduce of ``group`` needs a link for about twice the time of one by slices.

    In Open MPI the members reduce whole arrays to one of them, which then broadcasts, as in each allreduce in place and
    in any of up to three members (nbc_iallreduce.c of its libnbc).
    """
    return len(set(group.hosts)) > 1 and mpi.get_vendor()[0] == OPEN_MPI


def _pieces(array: Array) -> Iterator[Array]:
    step = LARGEST // array.itemsize
    for start in range(0, array.size, step):
        yield array[start : start + step]
