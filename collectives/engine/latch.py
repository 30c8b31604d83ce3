"""A flag that threads wait for and signal handlers may set."""

from __future__ import annotations

import threading

__all__ = ["Latch"]


class Latch:
    """Like ``threading.Event``, which can deadlock if a signal handler interrupts the thread that holds its lock."""

    def __init__(self) -> None:
        # Owned by the latch, held for a few instructions; reentrant. Waits end with set() or their timeout.
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        """Whether :meth:`set` was called since the last :meth:`clear`."""
        return self._set

    def set(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Make later calls of :meth:`wait` block."""
        self._set = False

    def wait(self, timeout: float | None) -> None:
        """Return when the latch is set, or after ``timeout`` seconds (None: no limit)."""
        with self._changed:
            if not self._set:
                self._changed.wait(timeout)
