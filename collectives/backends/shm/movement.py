"""Operations in which each rank fills its buffer for the others and empties theirs: all but allreduce.

They run in rounds, on the next buffer of every rank: fill, arrive at the barrier, wait, empty. To save waiting, a rank
fills the buffer of the next round and arrives there before it empties those of this round. A broadcast does not do so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from collectives.api import DType
from collectives.backends.host import Array, Bytes
from collectives.backends.phases import phases_in
from collectives.backends.shm.barrier import BUFFER_BYTES, ShmBarrier, ShmBuffers
from collectives.kernels.reduction import ReductionKernel
from collectives.kernels.segments import Segments

SMALL_BYTES = 1 << 15
HEADER = 64
ALIGNMENT = 64

Step = Callable[[int, Sequence[Array]], None]
"""The work of a rank in one round; the arguments are the number of the round and the buffers of all ranks."""


class Movement:
    """The work of one rank; all ranks call it in step, over the same ``buffers`` and ``barrier``."""

    def __init__(self, rank: int, size: int, buffers: ShmBuffers, barrier: ShmBarrier) -> None:
        self._rank = rank
        self._size = size
        self._buffers = buffers
        self._barrier = barrier
        self._steps = {dtype.label: self._step(BUFFER_BYTES // dtype.itemsize) for dtype in DType}
        self._alltoall_step = self._step(BUFFER_BYTES - HEADER)

    def _run_all(self, dtype: DType, fill: Step, empty: Step, rounds: int) -> None:
        """Do nothing, not even a crossing, where there are no rounds."""
        if rounds:
            self._run(dtype, fill, empty, lambda _: rounds)

    @phases_in(fill="copy in", empty="copy out")
    def _run(self, dtype: DType, fill: Step, empty: Step, rounds: Callable[[Sequence[Array]], int]) -> None:
        """``rounds`` returns the number of rounds once all buffers of the first are filled; there is at least one.

        A rank fills the buffer of three rounds ago: the others have emptied it before they arrived at the last one.
        The last crossing comes after all buffers but the last are empty, as the next operation expects.
        """
        current = self._buffers.next(dtype)
        fill(0, current)
        self._barrier.arrive()
        self._barrier.wait()
        last = max(1, rounds(current)) - 1
        for turn in range(last):
            following = self._buffers.next(dtype)
            fill(turn + 1, following)
            if turn + 1 < last:
                self._barrier.arrive()
                empty(turn, current)
            else:
                empty(turn, current)
                self._barrier.arrive()
            self._barrier.wait()
            current = following
        empty(last, current)

    @np.errstate(all="ignore")
    def reducescatter(
        self, source: Segments, destination: Segments, counts: Sequence[int], reduction: ReductionKernel
    ) -> None:
        """Combine this rank's parts of the buffers with its own part of ``source``, which needs no buffer."""
        if len(source) * reduction.dtype.itemsize <= SMALL_BYTES:
            self._reduce_small(source, destination, counts, reduction)
            return
        step = self._steps[reduction.dtype.label]
        starts = [0, *accumulate(counts)]

        def fill(turn: int, buffers: Sequence[Array]) -> None:
            for member, place, done, count in self._pieces(turn, step, counts):
                source.read(starts[member] + done, buffers[self._rank][place : place + count])

        def empty(turn: int, buffers: Sequence[Array]) -> None:
            done = turn * step
            count = min(step, counts[self._rank] - done)
            if count <= 0:
                return
            inputs = [buffer[place : place + count] for buffer, place in zip(buffers, self._places(step), strict=True)]
            inputs[self._rank] = source.gather(starts[self._rank] + done, starts[self._rank] + done + count)
            whole = destination.view(done, done + count)
            result = np.empty(count, reduction.dtype.storage) if whole is None else whole
            reduction.combine(result, inputs)
            if whole is None:
                destination.write(done, result)

        self._run_all(reduction.dtype, fill, empty, _rounds(max(counts), step))

    def _reduce_small(
        self, source: Segments, destination: Segments, counts: Sequence[int], reduction: ReductionKernel
    ) -> None:
        """A reducescatter in one round, in which each rank shows its whole source: the cost is in the calls."""
        total, count = len(source), counts[self._rank]
        if not total:
            return
        buffers, start = self._buffers.next(reduction.dtype), sum(counts[: self._rank])
        source.read(0, buffers[self._rank][:total])
        self._barrier.cross()
        if not count:
            return
        whole = destination.view(0, count)
        result = np.empty(count, reduction.dtype.storage) if whole is None else whole
        reduction.combine(result, [buffer[start : start + count] for buffer in buffers])
        if whole is None:
            destination.write(0, result)

    def allgather(self, source: Segments, destination: Segments, counts: Sequence[int]) -> None:
        """``counts[r]`` bytes come from rank r."""
        largest = max(counts)
        if 0 < largest <= SMALL_BYTES:
            self._gather_small(source, destination, counts)
            return
        starts = [0, *accumulate(counts)]

        def fill(turn: int, buffers: Sequence[Array]) -> None:
            done = turn * BUFFER_BYTES
            source.read(done, buffers[self._rank][: max(0, counts[self._rank] - done)])

        def empty(turn: int, buffers: Sequence[Array]) -> None:
            done = turn * BUFFER_BYTES
            for member, buffer in enumerate(buffers):
                piece = buffer[: max(0, counts[member] - done)]
                if member == self._rank:
                    _copy(source, done, destination, starts[member] + done, len(piece))
                else:
                    destination.write(starts[member] + done, piece)

        self._run_all(DType.UINT8, fill, empty, _rounds(largest, BUFFER_BYTES))

    def _gather_small(self, source: Segments, destination: Segments, counts: Sequence[int]) -> None:
        """An allgather in one round, in which this rank also reads its own buffer: the cost is in the calls."""
        buffers = self._buffers.next(DType.UINT8)
        source.read(0, buffers[self._rank][: counts[self._rank]])
        self._barrier.cross()
        start = 0
        for buffer, count in zip(buffers, counts, strict=True):
            destination.write(start, buffer[:count])
            start += count

    def broadcast(self, source: Bytes, destination: Bytes, root: int) -> None:
        """The root fills its buffer, the others empty it.

        The root runs one round ahead. Two rounds ahead it would use a third buffer, which displaces the others from the
        cache.
        """
        total, is_root = len(source), self._rank == root
        writes = not is_root or (source is not destination and not np.may_share_memory(source, destination))
        for done in range(0, total, BUFFER_BYTES):
            count = min(BUFFER_BYTES, total - done)
            buffer = self._buffers.next(DType.UINT8)[root]
            if is_root:
                buffer[:count] = source[done : done + count]
            self._barrier.cross()
            if writes:
                destination[done : done + count] = buffer[:count]

    def alltoall(self, source: Bytes, destination: Bytes, sends: Sequence[int], receives: Sequence[int]) -> None:
        """A buffer is divided among the receivers. Its header is the largest number of bytes that one of them gets."""
        rank, step = self._rank, self._alltoall_step
        send_starts, receive_starts = [0, *accumulate(sends)], [0, *accumulate(receives)]
        largest = max(0, *sends[:rank], *sends[rank + 1 :])

        def fill(turn: int, buffers: Sequence[Array]) -> None:
            buffer = buffers[rank]
            if not turn:
                self._buffers.headers()[rank][0] = largest
            done = turn * step
            for member, total in enumerate(sends):  # as _pieces, without the cost of the call
                if member != rank and total > done:
                    first, place = send_starts[member] + done, HEADER + (member - (member > rank)) * step
                    count = min(step, total - done)
                    buffer[place : place + count] = source[first : first + count]

        def empty(turn: int, buffers: Sequence[Array]) -> None:
            done = turn * step
            for member, total in enumerate(receives):
                if member != rank and total > done:
                    first, place = receive_starts[member] + done, HEADER + (rank - (rank > member)) * step
                    count = min(step, total - done)
                    destination[first : first + count] = buffers[member][place : place + count]

        def rounds(buffers: Sequence[Array]) -> int:
            return -(-max([header[0] for header in self._buffers.headers()]) // step)

        self._run(DType.UINT8, fill, empty, rounds)
        first, start, count = receive_starts[rank], send_starts[rank], sends[rank]
        destination[first : first + count] = source[start : start + count]

    def _step(self, room: int) -> int:
        """Number of elements for each of the other ranks in a buffer that has ``room`` elements in all."""
        return room // max(1, self._size - 1) // ALIGNMENT * ALIGNMENT

    def _places(self, step: int) -> list[int]:
        """The beginning of this rank's part in the buffer of each member: a buffer has no part for its own rank."""
        return [(self._rank - (self._rank > member)) * step for member in range(self._size)]

    def _pieces(self, turn: int, step: int, counts: Sequence[int]) -> list[tuple[int, int, int, int]]:
        """For each other member that gets data: its number, its place in the buffer, the count sent before, count."""
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
