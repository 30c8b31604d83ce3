"""A reduction in a pipeline: each member reduces one slice, and a piece of it while the next one arrives.

Every member sends each other one its data of that one's slice. When a piece has come from all, the member reduces it
and, in an allreduce, sends the result to all at once, behind the data that is already on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from collectives.backends.host import Array
from collectives.backends.tcp.link import Script, TcpLink, memory
from collectives.kernels.reduction import ReductionKernel
from collectives.kernels.segments import Segments

PIECE = 1 << 18
LEAST_PIECE = 1 << 14
SCRATCH = 1 << 22
"""Bytes: of a piece at most and at least, and of all pieces that a member holds, if those are not shorter."""
DEPTH = 4
"""The pieces that one of several other members may be ahead of another."""
ALIGNMENT = 64
"""Slices begin at multiples of so many elements, so that pieces do not share a line of the cache."""

Span = tuple[int, int]


class Data(NamedTuple):
    """The data of a member, and the place of its results: the whole of an allreduce, its own slice of a reducescatter.

    ``spans`` are the slices of the members in ``source``, in elements.
    """

    source: Segments
    destination: Segments
    spans: Sequence[Span]
    is_whole: bool


class SliceReduction:
    """The reduction of the slice of the member at ``position`` over its ``links``, by ``how``.

    ``scratch`` has the shape of :func:`scratch_shape`.
    """

    def __init__(
        self, position: int, links: Mapping[int, TcpLink], data: Data, how: ReductionKernel, scratch: Array
    ) -> None:
        self._position = position
        self._links = links
        self._data = data
        self._how = how
        self._scratch = scratch
        first, last = data.spans[position]
        _, self._depth, step = scratch.shape
        self._pieces = [(start, min(start + step, last)) for start in range(first, last, step)]
        self._offset = 0 if data.is_whole else first
        self._combined = 0
        self._arrived = [0] * self._depth

    def begin(self) -> None:
        """Give the links the data to send and the memory to receive into; it is over when they are idle."""
        for other, link in self._links.items():
            link.send(_views(self._data.source, *self._data.spans[other]))
            link.receive(self._incoming(other))
        if not self._links:
            for piece in self._pieces:
                self._combine(0, *piece)

    def _incoming(self, other: int) -> Script:
        for number, (start, stop) in enumerate(self._pieces):
            while number >= self._combined + self._depth:
                yield None
            yield memory(self._scratch[other, number % self._depth, : stop - start])
            self._arrive(number)
        if self._data.is_whole:
            yield from _views(self._data.destination, *self._data.spans[other])

    def _arrive(self, number: int) -> None:
        """A piece has come from one more member. The pieces of each come in order, so they are complete in order."""
        slot = number % self._depth
        self._arrived[slot] += 1
        if self._arrived[slot] == len(self._links):
            self._arrived[slot] = 0
            self._combine(slot, *self._pieces[number])
            self._combined += 1

    def _combine(self, slot: int, start: int, stop: int) -> None:
        data, pieces = self._data, self._scratch[:, slot, : stop - start]
        inputs = [*pieces]
        inputs[self._position] = data.source.gather(start, stop)
        target = start - self._offset, stop - self._offset
        whole = data.destination.view(*target)
        result = pieces[self._position] if whole is None else whole
        self._how.combine(result, inputs)
        if whole is None:
            data.destination.write(target[0], result)
        if data.is_whole:
            for link in self._links.values():
                link.send(_views(data.destination, *target))


def even_spans(count: int, size: int) -> list[Span]:
    """The slices of ``count`` elements for ``size`` members; the last ones may be shorter, or empty."""
    share = -(-count // (size * ALIGNMENT)) * ALIGNMENT
    return [(min(member * share, count), min((member + 1) * share, count)) for member in range(size)]


def scratch_shape(size: int, itemsize: int) -> tuple[int, int, int]:
    """Of the working memory for ``size`` members: members, pieces of each, elements of a piece."""
    depth = 1 if size == 2 else DEPTH
    return size, depth, max(LEAST_PIECE, min(PIECE, SCRATCH // (size * depth))) // itemsize


def _views(segments: Segments, start: int, stop: int) -> Iterator[memoryview]:
    return (memory(part) for part in segments.parts(start, stop) if part.size)
