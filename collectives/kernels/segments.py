"""Several flat arrays seen as one long vector."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from collectives.buffers import Buffer

Array = npt.NDArray[Any]


class Segments:
    """The concatenation of ``arrays`` (flat, of one dtype), without copying it."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self.arrays = arrays
        self._only = arrays[0] if len(arrays) == 1 else None  # most operations have one array; it needs no search
        self._ends = list(accumulate(map(len, arrays))) if self._only is None else [len(self._only)]

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def view(self, start: int, stop: int) -> Array | None:
        """self[start : stop] without a copy, when that lies in one array."""
        if self._only is not None:
            return self._only[start:stop] if start < len(self._only) and stop <= len(self._only) else None
        index = bisect_right(self._ends, start)
        if index == len(self._ends) or stop > self._ends[index]:
            return None
        first = self._ends[index] - len(self.arrays[index])
        return self.arrays[index][start - first : stop - first]

    def parts(self, start: int, stop: int) -> list[Array]:
        """The arrays that make up self[start : stop]: views, and at least one, if empty."""
        return [piece for piece, _, _ in self._pieces(start, stop)] or [self.arrays[0][:0]]

    def gather(self, start: int, stop: int) -> Array:
        """self[start : stop], not empty: a view where that lies in one array, or else a copy."""
        whole = self.view(start, stop)
        if whole is None:
            whole = np.empty(stop - start, self.arrays[0].dtype)
            self.read(start, whole)
        return whole

    def read(self, start: int, target: Array) -> None:
        """target = self[start : start + len(target)]"""
        if self._only is not None:
            target[:] = self._only[start : start + len(target)]
            return
        for piece, lower, upper in self._pieces(start, start + len(target)):
            target[lower:upper] = piece

    def write(self, start: int, source: Array) -> None:
        """self[start : start + len(source)] = source"""
        if self._only is not None:
            self._only[start : start + len(source)] = source
            return
        for piece, lower, upper in self._pieces(start, start + len(source)):
            piece[:] = source[lower:upper]

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[Array, int, int]]:
        """Each part of [start, stop) that lies in one array, and its place relative to ``start``."""
        index = bisect_right(self._ends, start)
        position = start
        while position < stop:
            array, end = self.arrays[index], self._ends[index]
            upper = min(stop, end)
            offset = position - (end - len(array))
            if upper > position:
                yield array[offset : offset + upper - position], position - start, upper - start
            position = upper
            index += 1


Span: TypeAlias = tuple[int, int]
"""The first element, and the one after the last."""


class Plane:
    """The memory of a long vector's elements from ``start`` on."""

    def __init__(self, buffers: Sequence[Buffer], start: int = 0) -> None:
        self._buffers = buffers
        self._ends = list(accumulate((buffer.count for buffer in buffers), initial=start))

    @property
    def end(self) -> int:
        """The element after the last."""
        return self._ends[-1]

    def part(self, span: Span) -> Buffer:
        """The memory of ``span``, which lies in one buffer and is not empty."""
        index = bisect_right(self._ends, span[0]) - 1
        first = self._ends[index]
        return self._buffers[index].part(span[0] - first, span[1] - first)

    def pieces(self, span: Span) -> list[Buffer]:
        """The buffers that make up ``span``, none of them empty; a whole one is the one that was given."""
        (start, stop), found = span, []
        index = bisect_right(self._ends, start) - 1
        while start < stop:
            first, end, buffer = self._ends[index], min(self._ends[index + 1], stop), self._buffers[index]
            if end > start:
                is_whole = (start, end) == (first, self._ends[index + 1])
                found.append(buffer if is_whole else buffer.part(start - first, end - first))
            start, index = end, index + 1
        return found

    def parts(self, span: Span) -> list[Buffer]:
        """The buffers that make up ``span``, at least one, if empty."""
        return self.pieces(span) or [self._buffers[0].part(0, 0)]

    def cuts(self, span: Span) -> list[int]:
        """The places inside of ``span`` where one buffer ends and the next begins."""
        return [end for end in self._ends if span[0] < end < span[1]]


def runs(span: Span, cuts: Sequence[int]) -> Iterator[Span]:
    """``span`` divided at ``cuts``, without empty runs."""
    return pairwise(sorted({*span, *cuts}))
