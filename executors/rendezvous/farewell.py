"""After a rendezvous that failed: rank 0 goes on to serve the reason, for ranks that come late."""

from __future__ import annotations

import threading
from collections.abc import Callable

from executors.rendezvous.base import nothing

__all__ = ["Farewell"]

SECONDS = 300.0
"""The hosts of a job may start minutes apart."""


class Farewell:
    """The reason that this process still serves; none at first. It ends after SECONDS, or before the next one."""

    def __init__(self) -> None:
        self._close = self._disown = self._forget = nothing

    def hold(self, close: Callable[[], None], disown: Callable[[], None]) -> None:
        """Call ``close`` at the end; ``disown`` leaves it to the parent, in a forked child."""
        self._close, self._disown = close, disown
        # Owner: this object; bound: SECONDS; abort: end().
        timer = threading.Timer(SECONDS, self.end)
        timer.daemon = True
        timer.start()
        self._forget = timer.cancel

    def end(self) -> None:
        """Serve no longer. Any number of times, from any thread."""
        self._forget()
        close, self._close, self._disown = self._close, nothing, nothing
        close()

    def disown(self) -> None:
        """In a forked child: all of it is the parent's. Takes no lock."""
        disown, self._close, self._disown, self._forget = self._disown, nothing, nothing, nothing
        disown()
