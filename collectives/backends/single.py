"""A world of one: real scaling and copying, no communication, no waits."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.api import DType, ShutDownError, override
from collectives.backends.base import Bootstrap, Call, Group, OffersVote, OnMissing, Vote
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.kernels.reduction import ReductionKernel, scale_array
from collectives.kernels.segments import Segments
from collectives.net.attempts import ConnectAttempt


class _Alone(Vote):
    """A single member always agrees."""

    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        agreed()
        call()
        return True

    def decline(self) -> None:
        return


class SingleBackend(HostBackend, OffersVote):
    """The backend of a group with one member. Every operation is at most one pass over the memory."""

    name = "single"

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self._error: Exception | None = None

    def allreduce_arrays(self, sources: Sequence[Array], destinations: Sequence[Array], how: ReductionKernel) -> None:
        self._check()
        for source, destination in zip(sources, destinations, strict=True):
            how.combine_silently(destination, (source,))

    def reducescatter_arrays(
        self, sources: Sequence[Array], destinations: Sequence[Array], counts: Sequence[int], how: ReductionKernel
    ) -> None:
        self._check()
        source, start = Segments(sources), 0
        for destination in destinations:
            piece = source.gather(start, start + destination.size)
            how.combine_silently(destination, (piece,))
            start += destination.size

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        self._check()
        source, start = Segments(sources), 0
        for destination in destinations:
            source.read(start, destination)
            start += destination.size

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        self._copy(source, destination)

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        self._copy(source, destination)

    def wait_for_all(self) -> None:
        self._check()

    @override
    def vote(self) -> Vote:
        return _Alone()

    def close(self) -> None:
        self._error = self._error or ShutDownError("the backend of this world of one was closed")

    def abort(self, error: Exception) -> None:
        self._error = error

    def _copy(self, source: Bytes, destination: Bytes) -> None:
        self._check()
        scale_array(source, destination, DType.UINT8, 1.0)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error


class SingleBootstrap(Bootstrap):
    """There is no other member to connect to."""

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> SingleBackend:
        return SingleBackend(self.group)
