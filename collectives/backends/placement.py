"""Moves a rank that shares a core although another core has fewer ranks, and binds a thread to a core."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress

logger = logging.getLogger(__name__)

current_core = ctypes.PyDLL(None).sched_getcpu  # sched_getcpu(3); -1, the core of no rank, if unknown

MOVE_SECONDS = 0.001
"""The shortest time between two moves of a rank: a move takes 5 µs."""
FRESH_SECONDS = 0.002
"""How soon after one wait the next must come for the cores that were noted at the first to be still true."""


class Placement:
    """Moves the calling thread of one rank. A thread that is bound to one core stays there."""

    def __init__(self) -> None:
        self._next_move = 0.0
        self._shared = -1, 0.0
        """The last wait at which this rank shared its core, and when that was noticed."""

    def improve(self, here: int, others: Sequence[int], wait: int) -> bool:
        """Move from core ``here`` to a better one, if there is one; ``others`` are the cores of the other ranks.

        Called in a ``wait`` for other ranks, by its number, while this rank shares its core. It moves in the second of
        two such waits in quick succession, because a rank that computes may have left the core that it was last seen
        on. The thread may run on the same cores as before afterwards: it is moved, not bound.
        """
        now = time.monotonic()
        before, noticed = self._shared
        if wait == before:
            return False
        self._shared = wait, now
        if now - noticed > FRESH_SECONDS or now < self._next_move:
            return False
        allowed = os.sched_getaffinity(0)
        core = better_core(here, others, allowed)
        if core is None:
            return False
        self._next_move = now + MOVE_SECONDS
        with suppress(OSError):  # the system took the core away in this moment
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(0, allowed)
        return True


def better_core(here: int, others: Sequence[int], allowed: Collection[int]) -> int | None:
    """The next core after ``here`` of those with the fewest of the ``others``; None if ``here`` is as good."""
    if here not in allowed:
        return None
    ranks = Counter(others)
    after = max(allowed) + 1
    core = min(allowed, key=lambda core: (ranks[core], (core - here) % after))
    return core if ranks[core] < ranks[here] else None


def pin(core: int) -> None:
    """Let the calling thread, and the threads it starts, run on ``core`` only. A warning where the system refuses."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        logger.warning("cannot bind the thread to core %d: %s; it runs where the system puts it", core, error.strerror)
