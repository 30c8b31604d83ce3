"""The ring of slabs through which the ranks of a host exchange data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType

__all__ = ["ROUND_BYTES", "Slabs", "slabs_bytes"]

ROUND_BYTES = 1 << 19
SLABS = 4

Array = npt.NDArray[Any]


def slabs_bytes(size: int) -> int:
    """Bytes of shared memory for the slabs of ``size`` ranks."""
    return SLABS * size * ROUND_BYTES


class Slabs:
    """Each of ``size`` ranks has SLABS slabs of ROUND_BYTES in ``memory`` (slabs_bytes(size) bytes, page-aligned).

    All ranks call :meth:`next` in the same order, once a round. When an operation ends on
    one rank, others may still be busy with the slabs that were used last, but with no others: so the next operation
    starts on the next slabs at once.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], size: int) -> None:
        ring = memory.reshape(SLABS, size, ROUND_BYTES)
        rows = [[ring[turn, member] for member in range(size)] for turn in range(SLABS)]
        self._typed = {dtype.label: [[slab.view(dtype.storage) for slab in row] for row in rows] for dtype in DType}
        self._turn = 0

    def next(self, dtype: DType) -> list[Array]:
        """The slab of each member for the next round, as elements of ``dtype.storage``."""
        self._turn = (self._turn + 1) % SLABS
        return self._typed[dtype.label][self._turn]

    def close(self) -> None:
        """Let go of the memory."""
        self._typed.clear()
