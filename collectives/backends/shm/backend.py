"""How the ranks of a host decide by themselves whether to run an operation: at the gate they cross anyway.

An operation runs in rounds, each on the next slab of every rank: copy a piece into its own slab, cross the gate, read
the slabs of the others. Slabs are small so that they stay in the cache: the only traffic to main memory is reading the
source and writing the destination.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.api import DType, ReduceOp, override
from collectives.backends.base import Group, Joining, OffersVote, OnDeath, OnWait, Vote
from collectives.backends.completion import DONE, Completion
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.shm.allreduce import ShmAllreduce
from collectives.backends.shm.barrier import BarrierDisagreement, ShmBarrier, ShmBuffers, barrier_bytes, buffers_bytes
from collectives.backends.shm.deaths import DeathWatch, deaths_bytes
from collectives.backends.shm.movement import Movement
from collectives.backends.shm.segment import Segment, SegmentSource, receive_segment
from collectives.buffers import Buffer
from collectives.kernels.reduction import reduction
from collectives.kernels.segments import Segments
from collectives.net.attempts import ConnectAttempt


class ShmVote(Vote):
    """The first crossing of an operation compares the values. Before it, an operation writes to its own slabs only."""

    def __init__(self, gate: ShmBarrier, slabs: ShmBuffers) -> None:
        self._gate = gate
        self._slabs = slabs

    @override
    def attempt(
        self,
        value: int,
        call: Callable[[], None],
        waiting: Callable[[list[int]], None],
        agreed: Callable[[], None],
    ) -> bool:
        turn = self._slabs.turn
        self._gate.ask(value, waiting, agreed)
        try:
            call()
            if self._gate.is_asking:  # the operation had nothing to exchange
                self._gate.cross()
        except BarrierDisagreement:
            self._slabs.turn = turn
            return False
        return True

    @override
    def decline(self) -> None:
        self._gate.arrive()


PAGE = 4096


class ShmBackend(HostBackend, OffersVote):
    """A :class:`HostBackend`. All ranks must be on one host and run as one user; Linux only."""

    name = "shm"
    closes_aside = True

    def __init__(self, group: Group, segment: Segment, timeout: float, crowded: bool) -> None:
        super().__init__(group)
        rank, size = group.position, group.size
        self._segment = segment
        base, gate = _slabs_start(size), barrier_bytes(size)
        self._gate = ShmBarrier(segment.array[:gate], group, timeout, crowded)
        self._words = segment.array[gate : gate + deaths_bytes(size)]
        self._deaths: DeathWatch | None = None
        self._slabs = ShmBuffers(segment.array[base : base + buffers_bytes(size)], size)
        self._allreduce = ShmAllreduce(rank, size, self._slabs, self._gate)
        self._movement = Movement(rank, size, self._slabs, self._gate)
        self._closed = False

    @override
    def allreduce(
        self,
        sources: Sequence[Buffer],
        destinations: Sequence[Buffer],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> Completion:
        if len(sources) == 1:  # the shorter way: the lists of several would take longer than a small tensor
            source, destination = sources[0].array, destinations[0].array
            if source is not None and destination is not None:
                self._allreduce.of_one(source, destination, reduction(sources[0].dtype, op, prescale, postscale))
                return DONE
        return super().allreduce(sources, destinations, op, prescale, postscale)

    @override
    def allreduce_arrays(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        how = reduction(dtype, op, prescale, postscale)
        self._allreduce(Segments(sources), Segments(destinations), how)

    @override
    def reducescatter_arrays(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """One crossing per SLAB_BYTES / (size - 1) for each of the other members."""
        how = reduction(dtype, op, prescale, postscale)
        self._movement.reducescatter(Segments(sources), Segments(destinations), counts, how)

    @override
    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """One crossing per SLAB_BYTES of the largest source."""
        self._movement.allgather(Segments(sources), Segments(destinations), counts)

    @override
    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        """One crossing per SLAB_BYTES."""
        self._movement.broadcast(source, destination, root)

    @override
    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """One crossing per SLAB_BYTES / (size - 1) for each of the other members."""
        self._movement.alltoall(source, destination, send_counts, receive_counts)

    @override
    def board(self) -> Vote:
        """The first crossing of an operation is a round of the board."""
        return ShmVote(self._gate, self._slabs)

    @override
    def attend(self, on_wait: OnWait) -> None:
        self._gate.on_wait = on_wait

    @override
    def waited(self) -> tuple[float, float]:
        return self._gate.waited()

    @override
    def watch(self, on_death: OnDeath) -> None:
        ranks = self.group.ranks
        self._deaths = DeathWatch(self._words, self.group.position, lambda position: on_death(ranks[position]))

    @override
    def phased(self) -> Sequence[object]:
        return self._allreduce, self._movement, self._gate

    @override
    def wait_for_all(self) -> None:
        """One crossing."""
        self._gate.cross()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._deaths is not None:
                self._deaths.close()
            del self._words
            self._gate.close()
            self._slabs.close()
            self._segment.close()

    @override
    def abort(self, error: Exception) -> None:
        self._gate.abort(error)


def segment_bytes(size: int) -> int:
    """Bytes of shared memory for a group of ``size`` members."""
    return _slabs_start(size) + buffers_bytes(size)


def _slabs_start(size: int) -> int:
    return -(-(barrier_bytes(size) + deaths_bytes(size)) // PAGE) * PAGE


class ShmJoining(Joining):
    """A :class:`Joining`. ``timeout`` bounds the silence of a peer within an operation, in seconds.

    ``crowded``: the host has more ranks than cores, see :class:`collectives.cores.Cores`.
    """

    def __init__(self, group: Group, timeout: float, crowded: bool) -> None:
        self._crowded = crowded
        self._nbytes = segment_bytes(group.size)
        self._timeout = timeout
        self._source = None if group.position else SegmentSource(self._nbytes, group.size)
        super().__init__(group, self._source.address if self._source is not None else b"")

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> ShmBackend:
        if self._source is not None:
            segment = self._source.hand_out(self.group, attempt)
        else:
            segment = receive_segment(offers[0], self._nbytes, self.group, attempt)
        return ShmBackend(self.group, segment, self._timeout, self._crowded)

    @override
    def close(self) -> None:
        if self._source is not None:
            self._source.close()
