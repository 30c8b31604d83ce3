"""Operations in which each rank fills its slab for the others and empties theirs: all but allreduce.

They run in rounds, on the next slab of every rank: fill, arrive at the gate, wait, empty. To save waiting, a rank fills
the slab of the next round and arrives there before it empties those of this round. A broadcast does not do so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from collectives.api import DType
from collectives.backends.host import Array, Bytes
from collectives.backends.phases import phases_in
from collectives.backends.shm.barrier import SLAB_BYTES, ShmBarrier, ShmBuffers
from collectives.kernels.reduction import Reduction
from collectives.kernels.segments import Segments

SMALL_BYTES = 1 << 15
HEADER = 64
ALIGNMENT = 64

Step = Callable[[int, Sequence[Array]], None]
"""The work of a rank in one round; the arguments are the number of the round and the slabs of all ranks."""


class Movement:
    """The work of one rank; all ranks call it in step, over the same ``slabs`` and ``gate``."""

    def __init__(self, rank: int, size: int, slabs: ShmBuffers, gate: ShmBarrier) -> None:
        self._rank = rank
        self._size = size
        self._slabs = slabs
        self._gate = gate
        self._steps = {dtype.label: self._step(SLAB_BYTES // dtype.itemsize) for dtype in DType}
        self._alltoall_step = self._step(SLAB_BYTES - HEADER)

    def _run_all(self, dtype: DType, fill: Step, empty: Step, rounds: int) -> None:
        """Do nothing, not even a crossing, where there are no rounds."""
        if rounds:
            self._run(dtype, fill, empty, lambda _: rounds)

    @phases_in(fill="copy in", empty="copy out")
    def _run(self, dtype: DType, fill: Step, empty: Step, rounds: Callable[[Sequence[Array]], int]) -> None:
        """``rounds`` returns the number of rounds once all slabs of the first are filled; there is at least one.

        A rank fills the slab of three rounds ago: the others have emptied it before they arrived at the last crossing.
        The last crossing comes after all slabs but the last are empty, as the next operation expects.
        """
        current = self._slabs.next(dtype)
        fill(0, current)
        self._gate.arrive()
        self._gate.wait()
        last = max(1, rounds(current)) - 1
        for turn in range(last):
            following = self._slabs.next(dtype)
            fill(turn + 1, following)
            if turn + 1 < last:
                self._gate.arrive()
                empty(turn, current)
            else:
                empty(turn, current)
                self._gate.arrive()
            self._gate.wait()
            current = following
        empty(last, current)

    @np.errstate(all="ignore")
    def reducescatter(
        self, source: Segments, destination: Segments, counts: Sequence[int], reduction: Reduction
    ) -> None:
        """Combine this rank's parts of the slabs with its own part of ``source``, which needs no slab."""
        if len(source) * reduction.dtype.itemsize <= SMALL_BYTES:
            self._reduce_small(source, destination, counts, reduction)
            return
        step = self._steps[reduction.dtype.label]
        starts = [0, *accumulate(counts)]

        def fill(turn: int, slabs: Sequence[Array]) -> None:
            for member, place, done, count in self._pieces(turn, step, counts):
                source.read(starts[member] + done, slabs[self._rank][place : place + count])

        def empty(turn: int, slabs: Sequence[Array]) -> None:
            done = turn * step
            count = min(step, counts[self._rank] - done)
            if count <= 0:
                return
            inputs = [slab[place : place + count] for slab, place in zip(slabs, self._places(step), strict=True)]
            inputs[self._rank] = source.gather(starts[self._rank] + done, starts[self._rank] + done + count)
            whole = destination.view(done, done + count)
            result = np.empty(count, reduction.dtype.storage) if whole is None else whole
            reduction.combine(result, inputs)
            if whole is None:
                destination.write(done, result)

        self._run_all(reduction.dtype, fill, empty, _rounds(max(counts), step))

    def _reduce_small(
        self, source: Segments, destination: Segments, counts: Sequence[int], reduction: Reduction
    ) -> None:
        """A reducescatter in one round, in which each rank shows its whole source: the cost is in the calls."""
        total, count = len(source), counts[self._rank]
        if not total:
            return
        slabs, start = self._slabs.next(reduction.dtype), sum(counts[: self._rank])
        source.read(0, slabs[self._rank][:total])
        self._gate.cross()
        if not count:
            return
        whole = destination.view(0, count)
        result = np.empty(count, reduction.dtype.storage) if whole is None else whole
        reduction.combine(result, [slab[start : start + count] for slab in slabs])
        if whole is None:
            destination.write(0, result)

    def allgather(self, source: Segments, destination: Segments, counts: Sequence[int]) -> None:
        """``counts[r]`` bytes come from rank r."""
        largest = max(counts)
        if 0 < largest <= SMALL_BYTES:
            self._gather_small(source, destination, counts)
            return
        starts = [0, *accumulate(counts)]

        def fill(turn: int, slabs: Sequence[Array]) -> None:
            done = turn * SLAB_BYTES
            source.read(done, slabs[self._rank][: max(0, counts[self._rank] - done)])

        def empty(turn: int, slabs: Sequence[Array]) -> None:
            done = turn * SLAB_BYTES
            for member, slab in enumerate(slabs):
                piece = slab[: max(0, counts[member] - done)]
                if member == self._rank:
                    _copy(source, done, destination, starts[member] + done, len(piece))
                else:
                    destination.write(starts[member] + done, piece)

        self._run_all(DType.UINT8, fill, empty, _rounds(largest, SLAB_BYTES))

    def _gather_small(self, source: Segments, destination: Segments, counts: Sequence[int]) -> None:
        """An allgather in one round, in which this rank also reads its own slab: the cost is in the calls."""
        slabs = self._slabs.next(DType.UINT8)
        source.read(0, slabs[self._rank][: counts[self._rank]])
        self._gate.cross()
        start = 0
        for slab, count in zip(slabs, counts, strict=True):
            destination.write(start, slab[:count])
            start += count

    def broadcast(self, source: Bytes, destination: Bytes, root: int) -> None:
        """The root fills its slab, the others empty it.

        The root runs one round ahead. Two rounds ahead it would use a third slab, which displaces the others from the
        cache.
        """
        total, is_root = len(source), self._rank == root
        writes = not is_root or (source is not destination and not np.may_share_memory(source, destination))
        for done in range(0, total, SLAB_BYTES):
            count = min(SLAB_BYTES, total - done)
            slab = self._slabs.next(DType.UINT8)[root]
            if is_root:
                slab[:count] = source[done : done + count]
            self._gate.cross()
            if writes:
                destination[done : done + count] = slab[:count]

    def alltoall(self, source: Bytes, destination: Bytes, sends: Sequence[int], receives: Sequence[int]) -> None:
        """A slab is divided among the receivers. Its header is the largest number of bytes that one of them gets."""
        rank, step = self._rank, self._alltoall_step
        send_starts, receive_starts = [0, *accumulate(sends)], [0, *accumulate(receives)]
        largest = max(0, *sends[:rank], *sends[rank + 1 :])

        def fill(turn: int, slabs: Sequence[Array]) -> None:
            slab = slabs[rank]
            if not turn:
                self._slabs.headers()[rank][0] = largest
            done = turn * step
            for member, total in enumerate(sends):  # as _pieces, without the cost of the call
                if member != rank and total > done:
                    first, place = send_starts[member] + done, HEADER + (member - (member > rank)) * step
                    count = min(step, total - done)
                    slab[place : place + count] = source[first : first + count]

        def empty(turn: int, slabs: Sequence[Array]) -> None:
            done = turn * step
            for member, total in enumerate(receives):
                if member != rank and total > done:
                    first, place = receive_starts[member] + done, HEADER + (rank - (rank > member)) * step
                    count = min(step, total - done)
                    destination[first : first + count] = slabs[member][place : place + count]

        def rounds(slabs: Sequence[Array]) -> int:
            return -(-max([header[0] for header in self._slabs.headers()]) // step)

        self._run(DType.UINT8, fill, empty, rounds)
        first, start, count = receive_starts[rank], send_starts[rank], sends[rank]
        destination[first : first + count] = source[start : start + count]

    def _step(self, room: int) -> int:
        """Number of elements for each of the other ranks in a slab that has ``room`` elements in all."""
        return room // max(1, self._size - 1) // ALIGNMENT * ALIGNMENT

    def _places(self, step: int) -> list[int]:
        """The beginning of this rank's part in the slab of each member: a slab has no part for its own rank."""
        return [(self._rank - (self._rank > member)) * step for member in range(self._size)]

    def _pieces(self, turn: int, step: int, counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """For each other member that gets data: its number, its place in the slab, the count sent before, count."""
        done = turn * step
        return [
            (member, (member - (member > self._rank)) * step, done, min(step, total - done))
            for member, total in enumerate(counts)
            if member != self._rank and total > done
        ]


def _rounds(total: int, step: int) -> int:
    return -(-total // step)


def _copy(source: Segments, first: int, destination: Segments, start: int, count: int) -> None:
    """destination[start : start + count] = source[first : first + count]; nothing to do where they are one memory."""
    for part in destination.parts(start, start + count):
        piece = source.view(first, first + len(part))
        if piece is None or not np.may_share_memory(piece, part):
            source.read(first, part)
        first += len(part)
