"""Warnings that others on the network can cause: they must not fill the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["SECONDS", "RareWarnings"]

SECONDS = 60.0
"""The least time between two warnings of one kind."""


class RareWarnings:
    """Logs one warning of a kind a minute to ``logger``, and the others for debugging. For one thread.

    A warning says how many of its kind were left out before it.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._next: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def warn(self, text: str, *values: object, kind: str = "") -> None:
        """Log ``text`` with ``values``, as :meth:`logging.Logger.warning` does."""
        now = self._clock()
        if now < self._next.get(kind, now):
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            self._logger.debug(text, *values)
            return
        self._next[kind] = now + SECONDS
        count = self._left_out.pop(kind, 0)
        more = f" (and {count} more before, which are not shown)" if count else ""
        self._logger.warning(text + more, *values)
