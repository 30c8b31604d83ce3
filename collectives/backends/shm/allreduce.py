"""Allreduce through slabs: three algorithms, by number of ranks and bytes.

S bytes on n ranks. *Pair*, for two ranks: each copies its own piece in, crosses the gate and combines everything
itself; S bytes come from the other rank. *Everywhere*, up to SMALL_BYTES on more ranks: the same, reading n S bytes.
*Slices*, for the rest: each combines its n-th of a round (reading S in all) and reads the S bytes of the result.

What limits a processor whose cores do not share a cache is who owns a cache line. A line that two cores hold for
reading must be taken away from one before the other may write it, one line at a time: 2.4 GB/s on an AMD EPYC across
two core complexes. Where the reader has written the line, too, it moves as fast as any: 11 to 18 GB/s. So in the pair
algorithm the reader leaves its result in the slab it read, and all slabs of a rank fit into a level-2 cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.backends.shm.gate import Gate
from collectives.backends.shm.slabs import ROUND_BYTES, Slabs
from collectives.reduction import Reduction
from collectives.segments import Segments

__all__ = ["Allreduce"]

SMALL_BYTES = 1 << 15
PAIR_BYTES = 1 << 17
ALIGNMENT = 64

Array = npt.NDArray[Any]


class Round(NamedTuple):
    """The elements [start, stop) of the long vector, and the slabs they go through."""

    slabs: list[Array]
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


class Allreduce:
    """What one rank does; all ranks call it in step, over the same ``slabs`` and ``gate``."""

    def __init__(self, rank: int, size: int, slabs: Slabs, gate: Gate) -> None:
        self._rank = rank
        self._size = size
        self._slabs = slabs
        self._gate = gate

    @np.errstate(all="ignore")
    def __call__(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """destination = the reduction of all ranks' sources; they may be the same memory."""
        if self._size == 2:
            self._pair(source, destination, reduction)
        elif len(source) * reduction.dtype.itemsize <= SMALL_BYTES:
            self._everywhere(source, destination, reduction)
        else:
            self._in_slices(source, destination, reduction)

    def _pair(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """A pipeline: between two crossings a rank copies in one round and combines the one before.

        Copying in comes before the wait, which it shortens: it goes to the slab of four rounds ago, which the other
        rank was done with when it arrived at the last gate but one.
        """
        step = PAIR_BYTES // reduction.dtype.itemsize
        before: Round | None = None
        for start in range(0, len(source), step):
            round = Round(self._slabs.next(reduction.dtype), start, min(start + step, len(source)))
            source.read(start, round.slabs[self._rank][: round.length])
            if before is not None:
                self._gate.wait()
                self._combine_pair(before, source, destination, reduction)
            self._gate.arrive()
            before = round
        if before is not None:
            self._gate.wait()
            self._combine_pair(before, source, destination, reduction)

    def _combine_pair(self, round: Round, source: Segments, destination: Segments, reduction: Reduction) -> None:
        mine = source.gather(round.start, round.stop)
        theirs = round.slabs[1 - self._rank][: round.length]
        reduction.merge(theirs, (mine, theirs) if self._rank == 0 else (theirs, mine))
        target = destination.view(round.start, round.stop)
        if target is not None:
            reduction.finish(theirs, target)
        else:
            reduction.finish(theirs, theirs)
            destination.write(round.start, theirs)

    def _everywhere(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """One crossing; every rank combines everything itself."""
        count = len(source)
        slabs = self._slabs.next(reduction.dtype)
        source.read(0, slabs[self._rank][:count])
        self._gate.cross()
        whole = destination.view(0, count)
        result = np.empty(count, reduction.dtype.storage) if whole is None else whole
        reduction.combine(result, [slab[:count] for slab in slabs])
        if whole is None:
            destination.write(0, result)

    def _in_slices(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """Each rank combines one slice of every round, in place in the slab of member 0.

        A pipeline as in :meth:`_pair`, of three stages: copy in one round, combine the one before, and copy out the one
        before that.
        """
        total, step = len(source), ROUND_BYTES // reduction.dtype.itemsize
        starts = range(0, total, step)
        rounds = [Round(self._slabs.next(reduction.dtype), start, min(start + step, total)) for start in starts]
        for turn in range(len(rounds) + 2):
            if turn < len(rounds):
                source.read(rounds[turn].start, rounds[turn].slabs[self._rank][: rounds[turn].length])
            if turn:
                self._gate.wait()
            if 0 < turn <= len(rounds):
                self._combine_slice(rounds[turn - 1], reduction)
            if turn > 1:
                done = rounds[turn - 2]
                destination.write(done.start, done.slabs[0][: done.length])
            if turn <= len(rounds):
                self._gate.arrive()

    def _combine_slice(self, round: Round, reduction: Reduction) -> None:
        share = -(-round.length // self._size)
        share += -share % ALIGNMENT
        mine = slice(min(self._rank * share, round.length), min((self._rank + 1) * share, round.length))
        inputs = [slab[mine] for slab in round.slabs]
        reduction.combine(inputs[0], inputs)
