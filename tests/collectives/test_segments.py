"""Several arrays as one vector."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.segments import Segments


def split(lengths):
    """Arrays of the given lengths that count on from each other."""
    ends = np.cumsum([0, *lengths])
    return [np.arange(start, stop) for start, stop in pairwise(ends)]


lengths = st.lists(st.integers(0, 6), max_size=6)


@given(lengths, st.data())
def test_reading_any_range(lengths, data):
    segments = Segments(split(lengths))
    total = sum(lengths)
    assert len(segments) == total
    start = data.draw(st.integers(0, total))
    target = np.full(data.draw(st.integers(0, total - start)), -1)
    segments.read(start, target)
    np.testing.assert_array_equal(target, np.arange(start, start + len(target)))


@given(lengths, st.data())
def test_writing_any_range_touches_nothing_else(lengths, data):
    arrays = split(lengths)
    total = sum(lengths)
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    Segments(arrays).write(start, np.full(count, -1))
    expected = np.arange(total)
    expected[start : start + count] = -1
    np.testing.assert_array_equal(np.concatenate([*arrays, np.arange(0)]), expected)


def test_a_single_array_needs_no_copy():
    array = np.arange(3)
    assert Segments([array]).single() is array
    assert Segments([array, array]).single() is None
    assert Segments([]).single() is None
