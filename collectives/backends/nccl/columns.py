"""Reductions and gathers of parts with different lengths: pieces with room of equal length for each member. Pure.

NCCL's reducescatter and allgather take as many elements from each member. So the parts of all members travel side by
side, a piece of each at a time, and shorter parts leave room that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from collectives.backends.nccl.device import Placed
from collectives.backends.plane import Plane, Span

__all__ = ["Column", "columns", "placed"]


class Column(NamedTuple):
    """``width`` elements of room for each member; ``spans[m]`` are the elements of member m that travel in it."""

    width: int
    spans: Sequence[Span]

    def pieces(self, plane: Plane, member: int, shift: int = 0) -> list[Placed]:
        """The memory of the part of ``member``; ``plane`` begins at element ``shift`` of all elements."""
        start, stop = self.spans[member]
        return placed(plane, (start - shift, stop - shift), member * self.width)


def columns(counts: Sequence[int], room: int) -> Iterator[Column]:
    """The columns for ``counts[m]`` elements of each member m, of at most ``room`` elements in all."""
    starts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    longest, step = max(counts), max(1, room // len(counts))
    for begin in range(0, longest, step):
        end = min(begin + step, longest)
        spans = [
            (start + min(begin, count), start + min(end, count)) for start, count in zip(starts, counts, strict=True)
        ]
        yield Column(end - begin, spans)


def placed(plane: Plane, span: Span, at: int = 0) -> list[Placed]:
    """The buffers of ``span``, one after another from element ``at`` on."""
    buffers = plane.pieces(span)
    starts = accumulate([buffer.count for buffer in buffers], initial=at)
    return [Placed(start, buffer) for start, buffer in zip(starts, buffers, strict=False)]
