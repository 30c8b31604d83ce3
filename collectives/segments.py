"""Several flat arrays seen as one long vector."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy.typing as npt

__all__ = ["Segments"]

Array = npt.NDArray[Any]


class Segments:
    """The concatenation of ``arrays`` (flat, of one dtype), without copying it."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self._ends = list(accumulate(len(array) for array in arrays))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def single(self) -> Array | None:
        """The one array, when there is just one."""
        return self._arrays[0] if len(self._arrays) == 1 else None

    def read(self, start: int, target: Array) -> None:
        """target = self[start : start + len(target)]"""
        for piece, lower, upper in self._pieces(start, start + len(target)):
            target[lower:upper] = piece

    def write(self, start: int, source: Array) -> None:
        """self[start : start + len(source)] = source"""
        for piece, lower, upper in self._pieces(start, start + len(source)):
            piece[:] = source[lower:upper]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Array, int, int]]:
        """Each part of [start, stop) that lies in one array, and where it lies relative to ``start``."""
        index = bisect_right(self._ends, start)
        position = start
        while position < stop:
            array, end = self._arrays[index], self._ends[index]
            upper = min(stop, end)
            offset = position - (end - len(array))
            if upper > position:
                yield array[offset : offset + upper - position], position - start, upper - start
            position = upper
            index += 1
