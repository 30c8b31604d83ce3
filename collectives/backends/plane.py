"""Several buffers as one long vector: runs of its elements -> parts of buffers. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

from collectives.buffers import Buffer

__all__ = ["Plane", "Span", "runs"]

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
