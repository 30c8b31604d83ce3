"""Random orders: complete, a window at a time, and with neighbours that change."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.spark.rows.order import CHUNK_BYTES, WINDOW_BYTES, Window, growing, mixed


def windows(rows, window, chunk, seed=0):
    return [each.tolist() for each in mixed(np.random.default_rng(seed), rows, Window(window, chunk))]


@given(rows=st.integers(0, 300), window=st.integers(1, 100), chunk=st.integers(1, 100), seed=st.integers(0, 5))
def test_every_row_is_in_one_window(rows, window, chunk, seed):
    found = windows(rows, window, chunk, seed)
    assert sorted(itertools.chain.from_iterable(found)) == list(range(rows))
    assert [len(each) for each in found[:-1]] == [window] * (len(found) - 1)


@given(row_bytes=st.integers(1, 1 << 26), batch_size=st.integers(1, 1 << 20))
def test_windows_are_whole_batches_of_bounded_size(row_bytes, batch_size):
    window = Window.of(row_bytes, batch_size)
    assert window.rows % batch_size == 0
    assert window.rows == batch_size or window.rows * row_bytes <= WINDOW_BYTES
    assert window.chunk == 1 or window.chunk * row_bytes <= CHUNK_BYTES


def test_a_window_has_chunks_from_anywhere():
    for window in windows(1000, window=100, chunk=10)[:-1]:
        assert max(window) - min(window) > 500


def test_rows_of_a_chunk_are_mixed():
    [window] = windows(100, window=100, chunk=10)
    assert sum(second == first + 1 for first, second in itertools.pairwise(window)) < 10  # 90, were they not


def test_neighbours_are_not_always_together():
    together = [any({40, 41} <= set(window) for window in windows(100, 20, 10, seed)) for seed in range(50)]
    assert 25 < sum(together) < 50


@pytest.mark.parametrize(("window", "sizes"), [(60, [24, 48, 60, 60]), (9, [9, 9, 9, 9]), (3000, [24, 48, 96, 192])])
def test_windows_that_grow(window, sizes):
    assert list(itertools.islice(growing(lambda first: window, 3), 4)) == sizes
