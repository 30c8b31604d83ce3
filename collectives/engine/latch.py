"""A flag to wait for that signal handlers may set."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """Like ``threading.Event``, whose lock would end in a deadlock where a handler interrupts its own thread in it."""

    def __init__(self) -> None:
        # Owned by the latch, held for a few instructions; reentrant. Waits end with set() or their timeout.
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        """Whether :meth:`set` was called since the last :meth:`clear`."""
        return self._set

    def set(self) -> None:
        """Let all who wait go on."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Let those wait who come from now on."""
        self._set = False

    def wait(self, timeout: float | None) -> None:
        """Return when the latch is set, or after ``timeout`` seconds (None: no limit)."""
        with self._changed:
            if not self._set:
                self._changed.wait(timeout)
