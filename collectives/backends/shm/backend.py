"""Collectives through shared memory, for ranks of one host.

Every rank has SLABS slabs of ``ROUND_BYTES`` in one segment. An operation runs in rounds, each on the next slab of
every rank: copy a piece into the own slab, cross the gate, read what the others put into theirs. Slabs are small so
that they stay in the cache: the only traffic to main memory is reading the source and writing the destination.

When an operation ends on one rank, other ranks may still read the slab that was used last, but no other: all have
arrived at the gate after they were done with the one before. So the next operation may start on the next slab at once.

Cost for S bytes on n ranks: an allreduce up to SMALL_BYTES takes one crossing, and each rank reads n S bytes of slabs;
a longer one takes a crossing per round and one more, each rank combines its n-th of every round (reading S in all), and
then reads the S bytes of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from collectives.api import DType, ReduceOp, Store
from collectives.backends.base import Array, Backend, Bytes
from collectives.backends.shm.gate import Gate, gate_bytes
from collectives.backends.shm.segment import Segment
from collectives.reduction import reduce_arrays
from collectives.segments import Segments

__all__ = ["ShmBackend"]

ROUND_BYTES = 1 << 19
SLABS = 4
SMALL_BYTES = 1 << 15
PAGE = 4096
HEADER = 64
ALIGNMENT = 64


class ShmBackend(Backend):
    """See :class:`Backend`. All ranks must be on one host and run as one user; Linux only."""

    name = "shm"

    def __init__(self, rank: int, size: int, segment: Segment, timeout: float) -> None:
        super().__init__(rank, size)
        self._segment = segment
        base = _slabs_start(size)
        self._gate = Gate(segment.array[: gate_bytes(size)], rank, size, timeout)
        slabs = segment.array[base : base + SLABS * size * ROUND_BYTES].reshape(SLABS, size, ROUND_BYTES)
        self._slabs = [[slabs[turn, member] for member in range(size)] for turn in range(SLABS)]
        self._typed = {
            np.dtype(dtype.storage): [[slab.view(dtype.storage) for slab in row] for row in self._slabs]
            for dtype in DType
        }
        self._turn = 0
        self._closed = False

    @classmethod
    def connect(cls, rank: int, size: int, store: Store, timeout: float) -> ShmBackend:
        """Join the group whose members share ``store``; raises PeerLostError, CollectiveTimeoutError."""
        nbytes = _slabs_start(size) + SLABS * size * ROUND_BYTES
        return cls(rank, size, Segment.share(store, rank, size, nbytes, timeout), timeout)

    def allreduce(
        self,
        sources: Sequence[Array],
        destinations: Sequence[Array],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """See :class:`Backend`."""
        source, destination = Segments(sources), Segments(destinations)
        if len(source) * dtype.itemsize <= SMALL_BYTES:
            self._reduce_everywhere(source, destination, dtype, op, prescale, postscale)
        else:
            self._reduce_slices(source, destination, dtype, op, prescale, postscale)

    def _reduce_everywhere(
        self, source: Segments, destination: Segments, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Every rank combines everything itself."""
        count = len(source)
        slabs = self._next_slabs(dtype)
        source.read(0, slabs[self.rank][:count])
        self._gate.cross()
        inputs = [slab[:count] for slab in slabs]
        whole = destination.single()
        result = np.empty(count, dtype.storage) if whole is None else whole
        reduce_arrays(result, inputs, dtype, op, prescale, postscale)
        if whole is None:
            destination.write(0, result)

    def _reduce_slices(
        self, source: Segments, destination: Segments, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        """Each rank combines one slice of every round, in place in the slab of member 0.

        A pipeline: between two crossings a rank copies in one round, combines the one before, and copies out the one
        before that. Copying in comes before the wait, which it shortens: it goes to the slab of four rounds ago, which
        all had copied out when they arrived at the last gate but one.
        """
        total, step = len(source), ROUND_BYTES // dtype.itemsize
        rounds = -(-total // step)
        pieces = [(self._next_slabs(dtype), start, min(step, total - start)) for start in range(0, total, step)]
        for turn in range(rounds + 2):
            if turn < rounds:
                slabs, start, count = pieces[turn]
                source.read(start, slabs[self.rank][:count])
            if turn:
                self._gate.wait()
            if 0 < turn <= rounds:
                slabs, _, count = pieces[turn - 1]
                self._combine_slice(slabs, count, dtype, op, prescale, postscale)
            if turn > 1:
                slabs, start, count = pieces[turn - 2]
                destination.write(start, slabs[0][:count])
            if turn <= rounds:
                self._gate.arrive()

    def _combine_slice(
        self, slabs: Sequence[Array], count: int, dtype: DType, op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        share = -(-count // self.size)
        share += -share % ALIGNMENT
        mine = slice(min(self.rank * share, count), min((self.rank + 1) * share, count))
        inputs = [slab[mine] for slab in slabs]
        reduce_arrays(inputs[0], inputs, dtype, op, prescale, postscale)

    def reducescatter(
        self,
        source: Array,
        destination: Array,
        counts: Sequence[int],
        dtype: DType,
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        """See :class:`Backend`. One crossing per round of ROUND_BYTES / size bytes for each member."""
        step = ROUND_BYTES // dtype.itemsize // self.size
        starts = [0, *accumulate(counts)]
        for done in range(0, max(counts), step):
            slabs = self._next_slabs(dtype)
            for member, total in enumerate(counts):
                count = min(step, total - done)
                if count > 0:
                    first = starts[member] + done
                    slabs[self.rank][member * step : member * step + count] = source[first : first + count]
            self._gate.cross()
            count = min(step, counts[self.rank] - done)
            if count > 0:
                inputs = [slab[self.rank * step : self.rank * step + count] for slab in slabs]
                reduce_arrays(destination[done : done + count], inputs, dtype, op, prescale, postscale)

    def allgather(self, source: Bytes, destination: Bytes, counts: Sequence[int]) -> None:
        """See :class:`Backend`. One crossing per ROUND_BYTES of the largest source."""
        starts = [0, *accumulate(counts)]
        for done in range(0, max(counts), ROUND_BYTES):
            slabs = self._next_slabs(DType.UINT8)
            piece = source[done : done + ROUND_BYTES]
            slabs[self.rank][: len(piece)] = piece
            self._gate.cross()
            for member, total in enumerate(counts):
                count = min(ROUND_BYTES, total - done)
                if count > 0:
                    first = starts[member] + done
                    destination[first : first + count] = slabs[member][:count]

    def broadcast(self, source: Bytes, destination: Bytes, root: int) -> None:
        """See :class:`Backend`. One crossing per ROUND_BYTES; the root runs one round ahead."""
        total = len(source)
        for done in range(0, total, ROUND_BYTES):
            count = min(ROUND_BYTES, total - done)
            slab = self._next_slabs(DType.UINT8)[root][:count]
            if self.rank == root:
                slab[:] = source[done : done + count]
            self._gate.cross()
            if self.rank != root or not np.may_share_memory(source, destination):
                destination[done : done + count] = slab

    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int], receive_counts: Sequence[int]
    ) -> None:
        """See :class:`Backend`. A slab is divided among the receivers; its header says how many bytes will follow."""
        step = (ROUND_BYTES - HEADER) // self.size
        send_starts, receive_starts = [0, *accumulate(send_counts)], [0, *accumulate(receive_counts)]
        done, longest = 0, 1
        while done < longest:
            slabs = self._next_slabs(DType.UINT8)
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

    def barrier(self) -> None:
        """See :class:`Backend`. One crossing."""
        self._gate.cross()

    def close(self) -> None:
        """See :class:`Backend`."""
        if not self._closed:
            self._closed = True
            self._gate.close()
            self._slabs.clear()
            self._typed.clear()
            self._segment.close()

    def abort(self, error: Exception) -> None:
        """See :class:`Backend`."""
        self._gate.abort(error)

    def _next_slabs(self, dtype: DType) -> list[Array]:
        self._turn = (self._turn + 1) % SLABS
        return self._typed[np.dtype(dtype.storage)][self._turn]


def _slabs_start(size: int) -> int:
    return -(-gate_bytes(size) // PAGE) * PAGE
