"""Memory that a backend keeps from call to call."""

from __future__ import annotations

import numpy as np

from collectives.api import DType
from collectives.backends.host import Array, Bytes

__all__ = ["KEPT", "Workspace"]

KEPT = 1 << 25
"""Bytes that a workspace keeps at most."""


class Workspace:
    """Grows when needed: fresh memory costs a page fault for each 4 KB. More than KEPT is not kept."""

    def __init__(self) -> None:
        self._memory: Bytes = np.empty(0, np.uint8)

    def take(self, count: int, dtype: DType) -> Array:
        """An array of ``count`` elements with any content. It replaces the one taken before."""
        nbytes = count * dtype.itemsize
        if nbytes > KEPT:
            return np.empty(count, dtype.storage)
        if self._memory.size < nbytes:
            self._memory = np.empty(nbytes, np.uint8)
        return self._memory[:nbytes].view(dtype.storage)
