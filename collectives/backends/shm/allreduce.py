"""Allreduce through slabs: two algorithms, by bytes.

S bytes on n ranks. *Everywhere*, up to SMALL_BYTES: each rank copies S in, crosses the gate and combines everything
itself, which reads n S. *Slices*, for the rest: a rank owns an n-th of every round. It copies the slices of the others
into its slab, (n - 1) / n S; combines its own slice of all slabs and of its source, S; writes the result over the
inputs in every other slab, (n - 1) / n S; and copies the results of the others out of its own slab, (n - 1) / n S.
Between these steps lies a crossing; a pipeline of rounds shares it.

Where cores share no cache, the ownership of cache lines limits the speed. If one core has only read a line, another
core must first invalidate that copy before it writes, one line at a time: 2.4 GB/s on an AMD EPYC across two core
complexes. If the reading core has also written the line, it moves at full speed: 11 to 18 GB/s. So the results go back
into every slab, although one copy would be enough: each line is written by the rank that read it last.
"""

from __future__ import annotations

from contextvars import copy_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.backends.phases import phase
from collectives.backends.shm.barrier import SLAB_BYTES, ShmBarrier, ShmBuffers
from collectives.kernels.reduction import Reduction
from collectives.kernels.segments import Segments

SMALL_BYTES = 1 << 15
ALIGNMENT = 64

Array = npt.NDArray[Any]


class ShmRound(NamedTuple):
    """``length`` elements of the long vector from ``start`` on, and the slabs they go through.

    This rank owns [lower, upper) of them.
    """

    slabs: list[Array]
    start: int
    length: int
    lower: int
    upper: int


class ShmAllreduce:
    """The work of one rank; all ranks call it in step, over the same ``slabs`` and ``gate``."""

    def __init__(self, rank: int, size: int, slabs: ShmBuffers, gate: ShmBarrier) -> None:
        self._rank = rank
        self._size = size
        self._slabs = slabs
        self._gate = gate
        # NumPy keeps what it does about an overflow in the context. To set that in each call takes longer than to add.
        self._silently = copy_context().run
        self._silently(np.seterr, all="ignore")

    def of_one(self, source: Array, destination: Array, reduction: Reduction) -> None:
        """destination = the reduction of all ranks' sources, for one array each; they may be the same memory."""
        if source.nbytes > SMALL_BYTES:
            self._in_slices(Segments((source,)), Segments((destination,)), reduction)
            return
        count = len(source)  # as in _everywhere(): for a small array, its segments would take longer than the data
        slabs = self._slabs.next(reduction.dtype)
        slabs[self._rank][:count] = source
        self._gate.cross()
        self._silently(reduction.combine, destination, [slab[:count] for slab in slabs])

    def __call__(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """destination = the reduction of all ranks' sources; they may be the same memory."""
        if len(source) * reduction.dtype.itemsize <= SMALL_BYTES:
            self._everywhere(source, destination, reduction)
        else:
            self._in_slices(source, destination, reduction)

    def _everywhere(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """One crossing; every rank combines everything itself."""
        count = len(source)
        slabs = self._slabs.next(reduction.dtype)
        source.read(0, slabs[self._rank][:count])
        self._gate.cross()
        whole = destination.view(0, count)
        result = np.empty(count, reduction.dtype.storage) if whole is None else whole
        self._silently(reduction.combine, result, [slab[:count] for slab in slabs])
        if whole is None:
            destination.write(0, result)

    def _in_slices(self, source: Segments, destination: Segments, reduction: Reduction) -> None:
        """A pipeline: between two crossings a rank copies in one round, combines the one before, and copies out the
        one before that.

        Copying in comes before the wait, which it shortens: it writes to the slab of three rounds ago. All others had
        finished with that slab when they arrived at the last gate but one. After the last gate a rank uses only its
        own slab. So the next operation may use the same slabs, which are in the cache.
        """
        before = self._slabs.turn
        total, step = len(source), SLAB_BYTES // reduction.dtype.itemsize
        rounds = [self._round(start, min(step, total - start), reduction) for start in range(0, total, step)]
        for turn in range(len(rounds) + 2):
            if turn < len(rounds):
                self._copy_in(rounds[turn], source)
            if turn:
                self._gate.wait()
            if 0 < turn <= len(rounds):
                self._combine(rounds[turn - 1], source, destination, reduction)
            if turn > 1:
                self._copy_out(rounds[turn - 2], destination)
            if turn <= len(rounds):
                self._gate.arrive()
        self._slabs.turn = before

    def _round(self, start: int, length: int, reduction: Reduction) -> ShmRound:
        share = -(-length // self._size)
        share += -share % ALIGNMENT
        lower, upper = (min(member * share, length) for member in (self._rank, self._rank + 1))
        return ShmRound(self._slabs.next(reduction.dtype), start, length, lower, upper)

    @phase("copy in")
    def _copy_in(self, round: ShmRound, source: Segments) -> None:
        slab = round.slabs[self._rank]
        source.read(round.start, slab[: round.lower])
        source.read(round.start + round.upper, slab[round.upper : round.length])

    @phase("combine")
    def _combine(self, round: ShmRound, source: Segments, destination: Segments, reduction: Reduction) -> None:
        if round.lower == round.upper:
            return
        start, stop = round.start + round.lower, round.start + round.upper
        inputs = [slab[round.lower : round.upper] for slab in round.slabs]
        unused = inputs[self._rank]  # no other rank reads or writes there
        inputs[self._rank] = source.gather(start, stop)
        whole = destination.view(start, stop)
        result = unused if whole is None else whole
        self._silently(reduction.combine, result, inputs)
        del inputs[self._rank]
        for other in inputs:
            other[:] = result
        if whole is None:
            destination.write(start, result)

    @phase("copy out")
    def _copy_out(self, round: ShmRound, destination: Segments) -> None:
        slab = round.slabs[self._rank]
        destination.write(round.start, slab[: round.lower])
        destination.write(round.start + round.upper, slab[round.upper : round.length])
