"""Several arrays as one vector."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from collectives.kernels.segments import Segments


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


@given(lengths, st.data())
def test_a_range_is_viewed_where_one_array_has_it_and_gathered_anyway(lengths, data):
    arrays = split(lengths)
    ends = np.cumsum([0, *lengths])
    start = data.draw(st.integers(0, max(ends[-1] - 1, 0)))
    stop = data.draw(st.integers(start, ends[-1]))
    view = Segments(arrays).view(start, stop)
    assert (view is not None) == any(lower <= start < upper and stop <= upper for lower, upper in pairwise(ends))
    if view is not None:
        assert view.size == 0 or any(np.shares_memory(view, array) for array in arrays)
        np.testing.assert_array_equal(view, np.arange(start, stop))
    if stop > start:
        np.testing.assert_array_equal(Segments(arrays).gather(start, stop), np.arange(start, stop))
