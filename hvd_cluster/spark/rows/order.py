"""Pure: in which order the rows of a shard are read, and how many at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WINDOW_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20
FIRST_BATCHES = 8

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Window:
    """The number of ``rows`` in memory at a time, in whole batches, and of rows in each ``chunk`` of them."""

    rows: int
    chunk: int

    @classmethod
    def of(cls, row_bytes: int, batch_size: int) -> Window:
        """The window for rows of that size: WINDOW_BYTES in chunks of CHUNK_BYTES, or else one batch, one row."""
        batches = max(1, WINDOW_BYTES // (row_bytes * batch_size))
        return cls(batches * batch_size, max(1, CHUNK_BYTES // row_bytes))


def growing(most: Callable[[int], int], batch_size: int) -> Iterator[int]:
    """The rows of each window of an epoch that begins before all rows have come: few at first, then doubled.

    ``most`` says how many rows a window may have that begins at a row.
    """
    first, rows = 0, FIRST_BATCHES * batch_size
    while True:
        rows = min(rows, most(first))
        yield rows
        first += rows
        rows *= 2


def mixed(generator: np.random.Generator, rows: int, window: Window) -> Iterator[Indices]:
    """All indices below ``rows`` in a random order, a window at a time.

    A window consists of random chunks, whose rows are shuffled together. A chunk has neighbouring rows, and begins at a
    random row, so that each call has other chunks. No more than a window of indices is in memory.
    """
    if rows == 0:
        return
    whole = rows // window.chunk
    shift = generator.integers(rows)
    starts = np.append(generator.permutation(whole), whole) * window.chunk + shift
    for first in range(0, rows, window.rows):
        positions = np.arange(first, min(first + window.rows, rows))
        indices = starts[positions // window.chunk] + positions % window.chunk
        np.subtract(indices, rows, out=indices, where=indices >= rows)
        generator.shuffle(indices)
        yield indices


def own_batches(windows: Iterable[Indices], batch_size: int, number: int, count: int) -> Iterator[Indices]:
    """Every ``count``-th batch of the epoch, from the batch ``number`` on, a window at a time."""
    if count == 1:
        yield from windows
        return
    first = 0
    for window in windows:
        batches = np.arange(first, first + len(window)) // batch_size
        own = window[batches % count == number]
        first += len(window)
        if len(own):
            yield own
