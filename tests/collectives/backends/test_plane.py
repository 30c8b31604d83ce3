"""Several buffers as one long vector."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.backends.nccl.backend import columns, placed
from collectives.buffers import as_buffer
from collectives.kernels.segments import Plane

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def plane_of(lengths, start=0):
    """Its elements are their own numbers."""
    ends = np.cumsum([start, *lengths])
    return Plane([as_buffer(np.arange(begin, end)) for begin, end in pairwise(ends)], start)


def numbers(buffers):
    return [number for buffer in buffers for number in buffer.host.tolist()]


@given(LENGTHS, st.integers(0, 9), st.data())
def test_pieces_make_up_the_span(lengths, start, data):
    plane = plane_of(lengths, start)
    first = data.draw(st.integers(start, plane.end))
    last = data.draw(st.integers(first, plane.end))
    pieces = plane.pieces((first, last))
    assert numbers(pieces) == list(range(first, last))
    assert all(piece.count for piece in pieces)
    assert len(plane.parts((first, last))) == max(len(pieces), 1)


def test_a_whole_buffer_is_the_one_that_was_given():
    buffers = [as_buffer(np.arange(3)), as_buffer(np.arange(4))]
    assert Plane(buffers).pieces((0, 7))[1] is buffers[1]


@given(LENGTHS, st.integers(1, 12))
def test_columns_have_every_element_once_and_room_for_all(counts, room):
    plane, found = plane_of(counts), {}
    for column in columns(counts, room):
        assert len(counts) * column.width <= max(room, len(counts))
        for member in range(len(counts)):
            for at, buffer in column.pieces(plane, member):
                assert member * column.width <= at <= (member + 1) * column.width - buffer.count
                found.setdefault(member, []).extend(buffer.host.tolist())
    ends = np.cumsum([0, *counts])
    expected = {m: list(range(ends[m], ends[m + 1])) for m, count in enumerate(counts) if count}
    assert found == expected


def test_placed_is_one_after_another():
    assert [(at, buffer.count) for at, buffer in placed(plane_of([2, 0, 3, 4]), (1, 7), at=10)] == [
        (10, 1),
        (11, 3),
        (14, 2),
    ]
