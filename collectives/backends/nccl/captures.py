"""CUDA graphs that another thread captures: a question about an event, or an allocation, would end the capture.

CUDA forbids that to all threads while one captures in the mode "global", which is torch's. The thread that looks for
failures asks about events at any time, so it asks in the mode "relaxed", as torch's own threads do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

__all__ = ["beside_captures"]

RELAXED = 2
"""A value of CUstreamCaptureMode."""


@contextmanager
def beside_captures() -> Iterator[None]:
    """In the block, the captures of other threads go on, whatever this thread calls."""
    mode = ctypes.c_int(RELAXED)
    _exchange(mode)
    try:
        yield
    finally:
        _exchange(mode)


def _exchange(mode: ctypes.c_int) -> None:
    """``mode`` becomes that of this thread, and has the one before. The GPU of this thread is set already."""
    _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


@lru_cache(1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
