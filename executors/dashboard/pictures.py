"""The encoded pictures of a job: all readers of the page share one for each tick."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["TICK_SECONDS", "Pictures"]

TICK_SECONDS = 1.0


class Pictures:
    """``draw`` returns the picture of now: it is called, and encoded, once a tick. For one thread."""

    def __init__(self, draw: Callable[[], Mapping[str, Any]]) -> None:
        self._draw = draw
        self._drawn = b""
        self.due = 0.0
        """When the next one can be had, in monotonic seconds."""

    def now(self) -> bytes:
        """The last picture, as JSON: no older than a tick."""
        return self._drawn if time.monotonic() < self.due else self.new()

    def new(self) -> bytes:
        """A picture of this moment, as JSON."""
        self._drawn = json.dumps(self._draw()).encode()
        self.due = time.monotonic() + TICK_SECONDS
        return self._drawn
