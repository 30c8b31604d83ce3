"""Collectives through shared memory, for ranks of one host.

An operation runs in rounds, each on the next slab of every rank: copy a piece into the own slab, cross the gate, read
what the others put into theirs. Slabs are small so that they stay in the cache: the only traffic to main memory is
reading the source and writing the destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from collectives.api import DType, ReduceOp
from collectives.backends.group import Group
from collectives.backends.host import Array, Bytes, HostBackend
from collectives.backends.shm.allreduce import Allreduce
from collectives.backends.shm.board import ShmBoard
from collectives.backends.shm.gate import Gate, gate_bytes
from collectives.backends.shm.segment import Segment
from collectives.backends.shm.slabs import SLAB_BYTES, Slabs, slabs_bytes
from collectives.kernels.reduction import Reduction
from collectives.kernels.segments import Segments
from collectives.planning.board import Board, OffersBoard

__all__ = ["ShmBackend", "segment_bytes"]

PAGE = 4096
HEADER = 64


class ShmBackend(HostBackend, OffersBoard):
    """See :class:`HostBackend`. All ranks must be on one host and run as one user; Linux only."""

    name = "shm"

    def __init__(self, group: Group, segment: Segment, timeout: float) -> None:
        super().__init__(group)
        rank, size = group.position, group.size
        self._segment = segment
        base = _slabs_start(size)
        self._gate = Gate(segment.array[: gate_bytes(size)], group, timeout)
        self._slabs = Slabs(segment.array[base : base + slabs_bytes(size)], size)
        self._allreduce = Allreduce(rank, size, self._slabs, self._gate)
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
        self._allreduce(Segments(sources), Segments(destinations), Reduction(dtype, op, prescale, postscale))

    @np.errstate(all="ignore")
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
        """See :class:`HostBackend`. One crossing per round of SLAB_BYTES / size bytes for each member."""
        source, destination = Segments(sources), Segments(destinations)
        reduction = Reduction(dtype, op, prescale, postscale)
        step = SLAB_BYTES // dtype.itemsize // self.size
        starts = [0, *accumulate(counts)]
        for done in range(0, max(counts), step):
            slabs = self._slabs.next(dtype)
            for member, total in enumerate(counts):
                count = min(step, total - done)
                if count > 0:
                    place = member * step
                    source.read(starts[member] + done, slabs[self.rank][place : place + count])
            self._gate.cross()
            count = min(step, counts[self.rank] - done)
            if count > 0:
                place = self.rank * step
                inputs = [slab[place : place + count] for slab in slabs]
                reduction.combine(inputs[0], inputs)
                destination.write(done, inputs[0])

    def allgather_bytes(self, sources: Sequence[Bytes], destinations: Sequence[Bytes], counts: Sequence[int]) -> None:
        """See :class:`HostBackend`. One crossing per SLAB_BYTES of the largest source."""
        source, destination = Segments(sources), Segments(destinations)
        starts = [0, *accumulate(counts)]
        for done in range(0, max(counts), SLAB_BYTES):
            slabs = self._slabs.next(DType.UINT8)
            pieces = [slab[: max(0, total - done)] for slab, total in zip(slabs, counts, strict=True)]
            source.read(done, pieces[self.rank])
            self._gate.cross()
            for start, piece in zip(starts, pieces, strict=False):
                destination.write(start + done, piece)

    def broadcast_bytes(self, source: Bytes, destination: Bytes, root: int) -> None:
        """See :class:`HostBackend`. One crossing per SLAB_BYTES; the root runs one round ahead."""
        total = len(source)
        for done in range(0, total, SLAB_BYTES):
            count = min(SLAB_BYTES, total - done)
            slab = self._slabs.next(DType.UINT8)[root][:count]
            if self.rank == root:
                slab[:] = source[done : done + count]
            self._gate.cross()
            if self.rank != root or not np.may_share_memory(source, destination):
                destination[done : done + count] = slab

    def alltoall_bytes(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """See :class:`HostBackend`. A slab is divided among the receivers; its header counts the bytes that follow."""
        step = (SLAB_BYTES - HEADER) // self.size
        send_starts, receive_starts = [0, *accumulate(send_counts)], [0, *accumulate(receive_counts)]
        done, longest = 0, 1
        while done < longest:
            slabs = self._slabs.next(DType.UINT8)
            self._put(slabs[self.rank], source, send_counts, send_starts, done, step)
            self._gate.cross()
            longest = max(int(slab[:8].view(np.int64)[0]) for slab in slabs)
            self._get(slabs, destination, receive_counts, receive_starts, done, step)
            done += step

    def _put(
        self, slab: Bytes, source: Bytes, counts: Sequence[int], starts: Sequence[int], done: int, step: int
    ) -> None:
        slab[:8].view(np.int64)[0] = max(counts)
        for member, total in enumerate(counts):
            count = min(step, total - done)
            if count > 0:
                first, place = starts[member] + done, HEADER + member * step
                slab[place : place + count] = source[first : first + count]

    def _get(
        self,
        slabs: Sequence[Bytes],
        destination: Bytes,
        counts: Sequence[int],
        starts: Sequence[int],
        done: int,
        step: int,
    ) -> None:
        place = HEADER + self.rank * step
        for member, total in enumerate(counts):
            count = min(step, total - done)
            if count > 0:
                first = starts[member] + done
                destination[first : first + count] = slabs[member][place : place + count]

    def board(self) -> Board:
        """See :class:`OffersBoard`. The first crossing of an operation is a round of the board."""
        return ShmBoard(self._gate, self._slabs)

    def wait_for_all(self) -> None:
        """See :class:`HostBackend`. One crossing."""
        self._gate.cross()

    def close(self) -> None:
        """See :class:`HostBackend`."""
        if not self._closed:
            self._closed = True
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
    return -(-gate_bytes(size) // PAGE) * PAGE
