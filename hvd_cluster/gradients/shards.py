"""Pure: the part of the parameters that each rank updates, and where parameters lie in one piece of memory.

Source: Rajbhandari, Rasley, Ruwase, He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020,
section 5.1, where each rank has the optimizer's state of its own part only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

ALIGNMENT = 256
"""Bytes between the places where a parameter may begin, or be cut: no vector of a kernel crosses such a place.

So the numbers that a kernel computes one by one, at the end of its memory, are those of the whole parameter.
"""


class ByteRange(NamedTuple):
    """The bytes ``start`` to ``stop`` of the parameter of this ``number``, in the order of its memory."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """Parameters of ``sizes`` bytes, which begin at ``offsets`` of one piece of memory.

    The rank at position r updates the bytes from ``bounds[r]`` to ``bounds[r + 1]``.
    """

    sizes: Sequence[int]
    offsets: Sequence[int]
    bounds: Sequence[int]

    @property
    def nbytes(self) -> int:
        """The size of the piece of memory."""
        return self.bounds[-1]

    def parts(self, position: int) -> list[ByteRange]:
        """The parts of the rank at ``position``, in the order of the parameters; none is empty."""
        low, high = self.bounds[position], self.bounds[position + 1]
        parts = [
            ByteRange(index, max(low - offset, 0), min(high - offset, size))
            for index, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True))
        ]
        return [part for part in parts if part.start < part.stop]

    def counts(self, number: int) -> list[int]:
        """The bytes of the parameter of this ``number`` that each rank updates, one rank after the other."""
        start, stop = self.offsets[number], self.offsets[number] + self.sizes[number]
        bounds = [min(max(bound, start), stop) for bound in self.bounds]
        return [high - low for low, high in pairwise(bounds)]


def cut(sizes: Sequence[int], ranks: int) -> Layout:
    """Equal parts of all bytes; a parameter may be cut."""
    offsets = [0, *accumulate(map(_aligned, sizes))]
    total = offsets.pop()
    blocks = total // ALIGNMENT
    return Layout(sizes, offsets, [blocks * rank // ranks * ALIGNMENT for rank in range(ranks + 1)])


def deal(sizes: Sequence[int], ranks: int) -> Layout:
    """Whole parameters, the largest first, each to the rank that has the fewest bytes."""
    loads, owned = [0] * ranks, [list[int]() for _ in range(ranks)]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        rank = loads.index(min(loads))
        loads[rank] += _aligned(sizes[index])
        owned[rank].append(index)
    bounds = [0, *accumulate(loads)]
    offsets = [0] * len(sizes)
    for bound, members in zip(bounds[:-1], owned, strict=True):
        ordered = sorted(members)
        places = accumulate((_aligned(sizes[index]) for index in ordered), initial=bound)
        for index, place in zip(ordered, places, strict=False):
            offsets[index] = place
    return Layout(sizes, offsets, bounds)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
