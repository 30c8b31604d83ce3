"""Collectives through shared memory, for ranks of one host.

An operation runs in rounds, each on the next slab of every rank: copy a piece into its own slab, cross the gate, read
the slabs of the others. Slabs are small so that they stay in the cache: the only traffic to main memory is reading the
source and writing the destination.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.api import DType, ReduceOp
from collectives.backends.base import OnDeath, OnWait
from collectives.backends.group import Group
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.shm.allreduce import Allreduce
from collectives.backends.shm.board import ShmBoard
from collectives.backends.shm.deaths import DeathWatch, deaths_bytes
from collectives.backends.shm.gate import Gate, gate_bytes
from collectives.backends.shm.movement import Movement
from collectives.backends.shm.segment import Segment
from collectives.backends.shm.slabs import Slabs, slabs_bytes
from collectives.kernels.reduction import reduction
from collectives.kernels.segments import Segments
from collectives.planning.board import Board, OffersBoard

__all__ = ["ShmBackend", "segment_bytes"]

PAGE = 4096


class ShmBackend(HostBackend, OffersBoard):
    """See :class:`HostBackend`. All ranks must be on one host and run as one user; Linux only."""

    name = "shm"
    closes_aside = True

    def __init__(self, group: Group, segment: Segment, timeout: float, crowded: bool) -> None:
        super().__init__(group)
        rank, size = group.position, group.size
        self._segment = segment
        base, gate = _slabs_start(size), gate_bytes(size)
        self._gate = Gate(segment.array[:gate], group, timeout, crowded)
        self._words = segment.array[gate : gate + deaths_bytes(size)]
        self._deaths: DeathWatch | None = None
        self._slabs = Slabs(segment.array[base : base + slabs_bytes(size)], size)
        self._allreduce = Allreduce(rank, size, self._slabs, self._gate)
        self._movement = Movement(rank, size, self._slabs, self._gate)
        self._closed = False

    def allreduce_arrays(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """See :class:`HostBackend`."""
        how = reduction(dtype, op, prescale, postscale)
        if len(sources) == 1:
            self._allreduce.of_one(sources[0], destinations[0], how)
        else:
            self._allreduce(Segments(sources), Segments(destinations), how)

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
        """See :class:`HostBackend`. One crossing per SLAB_BYTES / (size - 1) for each of the other members."""
        how = reduction(dtype, op, prescale, postscale)
        self._movement.reducescatter(Segments(sources), Segments(destinations), counts, how)

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """See :class:`HostBackend`. One crossing per SLAB_BYTES of the largest source."""
        self._movement.allgather(Segments(sources), Segments(destinations), counts)

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        """See :class:`HostBackend`. One crossing per SLAB_BYTES."""
        self._movement.broadcast(source, destination, root)

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """See :class:`HostBackend`. One crossing per SLAB_BYTES / (size - 1) for each of the other members."""
        self._movement.alltoall(source, destination, send_counts, receive_counts)

    def board(self) -> Board:
        """See :class:`OffersBoard`. The first crossing of an operation is a round of the board."""
        return ShmBoard(self._gate, self._slabs)

    def attend(self, on_wait: OnWait) -> None:
        """See :class:`Backend`."""
        self._gate.on_wait = on_wait

    def waited(self) -> tuple[float, float]:
        """See :class:`Backend`."""
        return self._gate.waited()

    def watch(self, on_death: OnDeath) -> None:
        """See :class:`Backend`."""
        ranks = self.group.ranks
        self._deaths = DeathWatch(self._words, self.group.position, lambda position: on_death(ranks[position]))

    def phased(self) -> Sequence[object]:
        """See :class:`Backend`."""
        return self._allreduce, self._movement, self._gate

    def wait_for_all(self) -> None:
        """See :class:`HostBackend`. One crossing."""
        self._gate.cross()

    def close(self) -> None:
        """See :class:`HostBackend`."""
        if not self._closed:
            self._closed = True
            if self._deaths is not None:
                self._deaths.close()
            del self._words
            self._gate.close()
            self._slabs.close()
            self._segment.close()

    def abort(self, error: Exception) -> None:
        """See :class:`HostBackend`."""
        self._gate.abort(error)


def segment_bytes(size: int) -> int:
    """Bytes of shared memory for a group of ``size`` members."""
    return _slabs_start(size) + slabs_bytes(size)


def _slabs_start(size: int) -> int:
    return -(-(gate_bytes(size) + deaths_bytes(size)) // PAGE) * PAGE
