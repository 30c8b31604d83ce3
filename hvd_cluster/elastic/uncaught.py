"""An exception that ends the main thread, also where another thread keeps the process from ending."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from executors.failure import Kind, brief, kind_of_chain
from hvd_cluster.worlds import Worlds

__all__ = ["tell_of_uncaught"]


def tell_of_uncaught(worlds: Worlds) -> None:
    """Tell the driver of ``worlds`` of the exception that ends this process, when its traceback has been shown."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(worlds)


class _Hook:
    """Does first what the hook before it does."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._before = sys.excepthook
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._before(kind, error, trace)
        if os.getpid() == self._process and isinstance(error, Exception) and kind_of_chain(error) is Kind.EXCEPTION:
            self._worlds.tell_exception(brief(error), is_uncaught=True)
