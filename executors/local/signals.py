"""Signals that a launcher passes on to its ranks: notices, which mean something to the script only."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["PASSED", "passed_on"]

PASSED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@contextmanager
def passed_on(pass_on: Callable[[int], None]) -> Iterator[None]:
    """Call ``pass_on(number)``, which must not wait, for each of PASSED, in the main thread.

    A signal that is ignored stays so, such as SIGHUP under nohup. In another thread, signals are as they were.
    """

    def heed(number: int, frame: FrameType | None) -> None:
        pass_on(number)

    is_main = threading.current_thread() is threading.main_thread()
    heeded = [number for number in PASSED if is_main and signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, heed) for number in heeded}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
