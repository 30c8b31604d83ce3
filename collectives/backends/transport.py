"""Messages between the members of a group, from and to host memory: the part of a backend that a library provides."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from collectives.api import DType, EngineError, ReduceOp, override
from collectives.backends.base import Group, OnWait, ignore_waits
from collectives.backends.host import Array, Bytes
from collectives.backends.phases import phase

Message = tuple[int, Bytes]
"""The position of the other member, and the memory to send from or to receive into."""


class Transport(ABC):
    """The simple collectives that :class:`collectives.backends.messaging.MessagingBackend` is built from.

    All members call the same methods in the same order; the calls come from one thread and return when the memory may
    be used again. Memory is flat and contiguous, sources and destinations do not overlap. Every method but
    :meth:`close` raises PeerLostError, CollectiveTimeoutError or, after :meth:`abort`, the error that abort was given.
    A library that can only send and receive is a :class:`PointToPoint`.
    """

    name: str

    def __init__(self, group: Group) -> None:
        self.group = group
        self.on_wait: OnWait = ignore_waits
        """To be called while this member waits for another one for long, see :meth:`Backend.attend`."""
        self._error: Exception | None = None
        # Owned by this transport; held for a few instructions. A signal handler may abort while its thread has it.
        self._error_lock = threading.RLock()

    def check(self) -> None:
        """Raise the error that ended this transport, if one did."""
        if self._error is not None:
            raise self._error

    def enter(self) -> None:
        """As :meth:`check`, for an operation whose first call is one of the collectives."""
        self.check()

    def _end(self, error: Exception) -> Exception:
        """The error that this and all later calls raise: ``error``, or an earlier one."""
        with self._error_lock:
            self._error = self._error or error
            return self._error

    @phase("exchange")
    @abstractmethod
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        """Send ``send_counts[i]`` consecutive bytes to each member i; receive ``receive_counts[i]`` from each.

        Without counts, the bytes go in equal parts.
        """

    @phase("exchange")
    @abstractmethod
    def allgather(self, source: Bytes, destination: Bytes) -> None:
        """Put the sources of all members, which have one length, into ``destination``, in the order of the members."""

    @phase("exchange")
    @abstractmethod
    def broadcast(self, data: Bytes, root: int) -> None:
        """Copy ``data``, which is not empty, of the member at position ``root`` to the ``data`` of all others."""

    @phase("exchange")
    @abstractmethod
    def barrier(self) -> None:
        """Return when every member has called it."""

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        """Whether :meth:`allreduce` computes ``op`` exactly as :mod:`collectives.kernels.reduction` describes it."""
        return False

    @phase("exchange")
    def allreduce(self, array: Array, op: ReduceOp) -> None:
        """Reduce ``array`` in place, bit-identically on all members. Only called where :meth:`reduces` is true."""
        raise EngineError(f"transport {self.name} does not reduce")

    @abstractmethod
    def close(self) -> None:
        """Release everything; all members close. Idempotent."""

    @abstractmethod
    def abort(self, error: Exception) -> None:
        """Make every present and future call on this member raise ``error``, within 0.1 s. Safe from any thread."""


class PointToPoint(Transport):
    """A transport that sends and receives messages. Its collectives, for P members and S bytes, cost per member:

    =========  ==========================================  ==============  =============
    method     algorithm                                   steps           bytes sent
    =========  ==========================================  ==============  =============
    alltoall   all messages at once                        1               all but its own
    allgather  all to all at once                          1               (P - 1) S
    broadcast  a binomial tree, all children at once       log2 P          S log2 P at the root
    barrier    each tells the member 1, 2, 4... ahead      log2 P          log2 P
    =========  ==========================================  ==============  =============

    A library overrides those that it does faster itself.
    """

    @abstractmethod
    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """Send and receive all of these messages at the same time; return when all have been sent and received.

        No message is empty or goes to this member itself, and there is at most one to and one from each member. Sender
        and receiver agree about the length. Two members may send to each other at once, with any lengths.
        """

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        size, here = self.group.size, self.group.position
        outgoing, incoming = by_member(source, send_counts, size), by_member(destination, receive_counts, size)
        incoming[here][:] = outgoing[here]
        self._exchange_others(outgoing, incoming)

    @override
    def allgather(self, source: Bytes, destination: Bytes) -> None:
        rows = destination.reshape(self.group.size, source.size)
        rows[self.group.position] = source
        self._exchange_others([source] * self.group.size, list(rows))

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        size = self.group.size
        relative = (self.group.position - root) % size
        reach = relative & -relative or 1 << (size - 1).bit_length()  # members below relative + reach are served by it
        steps = [1 << exponent for exponent in reversed(range(reach.bit_length() - 1))]
        if relative:
            self.exchange([], [((relative - reach + root) % size, data)])
        children = [(relative + step + root) % size for step in steps if relative + step < size]
        if children:
            self.exchange([(child, data) for child in children], [])

    @override
    def barrier(self) -> None:
        size, here, distance = self.group.size, self.group.position, 1
        while distance < size:
            word, answer = np.zeros(1, np.uint8), np.zeros(1, np.uint8)
            self.exchange([((here + distance) % size, word)], [((here - distance) % size, answer)])
            distance *= 2

    def _exchange_others(self, outgoing: Sequence[Bytes], incoming: Sequence[Bytes]) -> None:
        """``outgoing[i]`` goes to member i and ``incoming[i]`` comes from it; nothing goes to this member."""
        sends = [(other, outgoing[other]) for other in self.group.others if outgoing[other].size]
        receives = [(other, incoming[other]) for other in self.group.others if incoming[other].size]
        self.exchange(sends, receives)


def by_member(data: Bytes, counts: Sequence[int], size: int) -> list[Bytes]:
    """The part of each of ``size`` members in ``data``: of its count, or equal ones where there are no ``counts``."""
    return [data[part] for part in parts(counts or [data.size // size] * size)]


def parts(counts: Sequence[int]) -> list[slice]:
    """The part of each member in memory that holds ``counts[i]`` elements for member i, in their order."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]
