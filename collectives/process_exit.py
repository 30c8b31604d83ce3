"""Keeps daemon threads out of the way while the process ends.

Up to Python 3.13, a daemon thread that takes the GIL of an interpreter in finalisation is ended by pthread_exit. That
unwinds the C++ frames of extensions such as torch, where it ends in std::terminate: the process aborts.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable

__all__ = ["ProcessExit"]

GRACE_SECONDS = 0.25
"""How long the end of the process waits for threads that used the engine and are not in a call of it."""
HOLD_SECONDS = 60.0
"""How long a thread is held; the process has ended long before, unless another exit handler waits for that thread."""
LOOK_SECONDS = 0.001


class ProcessExit:
    """The end of this process: :meth:`begin`, then :meth:`settle`, by the thread that runs the exit handlers.

    Daemon threads call :meth:`hold`.
    """

    def __init__(self) -> None:
        self._thread: int | None = None
        self._held: set[int] = set()
        # Owned by this object and never set: threads that are held wait for it, at most HOLD_SECONDS.
        self._never = threading.Event()

    def begin(self) -> None:
        """From now on, threads other than this one are held."""
        self._thread = threading.get_ident()

    def hold(self) -> None:
        """Return at once, but block a daemon thread of a process that ends: its next steps may abort the process."""
        if self._thread is None or self._thread == threading.get_ident() or not threading.current_thread().daemon:
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal would make this thread take the GIL
        self._held.add(threading.get_ident())
        self._never.wait(HOLD_SECONDS)

    def settle(self, threads: Iterable[int]) -> None:
        """Wait until those of ``threads`` that are daemons are held or have ended, at most GRACE_SECONDS."""
        users, deadline = set(threads), time.monotonic() + GRACE_SECONDS
        while self._free(users) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _free(self, users: set[int]) -> set[int]:
        alive = {thread.ident for thread in threading.enumerate() if thread.daemon and thread.ident is not None}
        return (users & alive) - self._held - {self._thread or 0}
