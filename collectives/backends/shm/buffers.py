"""The ring of slabs through which the ranks of a host exchange data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType

SLAB_BYTES = 1 << 20
SLABS = 3
WORD = 8

Array = npt.NDArray[Any]


def buffers_bytes(size: int) -> int:
    """Bytes of shared memory for the slabs of ``size`` ranks."""
    return SLABS * size * SLAB_BYTES


class ShmBuffers:
    """Each of ``size`` ranks has SLABS slabs of SLAB_BYTES in ``memory`` (slabs_bytes(size) bytes, page-aligned).

    All ranks call :meth:`next` in the same order, once a round. A rank may fill the slabs of two rounds without a
    crossing: ranks that have not arrived at the gate may still use the last slabs, but no others. So the next operation
    starts on the next slabs at once. ``turn`` may be set back while no rank has crossed the gate since.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        ring = memory.reshape(SLABS, size, SLAB_BYTES)
        rows = [[ring[turn, member] for member in range(size)] for turn in range(SLABS)]
        self._rows = rows
        self._typed: dict[str, list[list[Array]]] = {}
        self._headers: list[list[memoryview]] = []
        self.turn = 0

    def next(self, dtype: DType) -> list[Array]:
        """The slab of each member for the next round, as elements of ``dtype.storage``."""
        self.turn = (self.turn + 1) % SLABS
        try:
            return self._typed[dtype.label][self.turn]
        except KeyError:  # views of all dtypes would make up most of the time in which the backend connects
            views = [[slab.view(dtype.storage) for slab in row] for row in self._rows]
            return self._typed.setdefault(dtype.label, views)[self.turn]

    def headers(self) -> list[memoryview]:
        """The first 8 bytes of the slab of each member for this round, as an integer with a sign."""
        if not self._headers:
            self._headers = [[memoryview(slab.data)[:WORD].cast("q") for slab in row] for row in self._rows]
        return self._headers[self.turn]

    def close(self) -> None:
        """Release the views of the memory."""
        self._rows.clear()
        self._typed.clear()
        self._headers.clear()
