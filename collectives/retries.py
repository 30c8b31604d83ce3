"""When to repeat a failed attempt: soon, then less and less often, and not on all ranks at the same moments."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

__all__ = ["attempts"]

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0


def attempts(seconds: float, wait: Callable[[float], object] = time.sleep) -> Iterator[float]:
    """One item for each attempt that may begin within ``seconds``, at least one: the remaining seconds.

    Between attempts, ``wait`` is called with the seconds of a pause, each twice as long as the one before, up to
    LONGEST_PAUSE, and shortened at random by up to a half.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    yield seconds
    while time.monotonic() + pause < deadline:
        wait(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)
        yield max(0.0, deadline - time.monotonic())
