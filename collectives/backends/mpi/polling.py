"""Waiting for MPI: nothing but its own calls move messages on, so a wait is a loop of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

__all__ = ["Look", "poll"]

Look = Callable[[float], None]
"""Called with the seconds waited so far, many times a second; it raises to end the wait."""

SPIN_SECONDS = 0.0005
"""Sleeping costs a small operation its speed, spinning costs the other threads their core."""
SHARE = 0.02
"""A pause is this part of the time waited so far."""
LONGEST_PAUSE = 0.001


def poll(is_over: Callable[[], bool], look: Look) -> None:
    """Call ``is_over``, which lets MPI work, until it returns True. ``look`` bounds and aborts the wait."""
    if is_over():
        return
    began = time.monotonic()
    while not is_over():
        waited = time.monotonic() - began
        look(waited)
        if waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(waited * SHARE, LONGEST_PAUSE))
