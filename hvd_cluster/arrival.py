"""The way of this process into its first world, for the timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise

from collectives.timeline.spans import Step
from executors.course import Course

__all__ = ["Arrival"]


class Arrival:
    """Begins with the first ``init()`` of the process. For one thread at a time."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._is_told = False

    def begin(self) -> None:
        """``init()`` was called."""
        self._begun = self._begun or time.monotonic()

    def steps(self, environment: Mapping[str, str]) -> list[Step]:
        """The steps until now, in seconds since the epoch; none at the second call."""
        if self._begun is None or self._is_told:
            return []
        self._is_told = True
        course = Course.of(environment)
        now = time.time()
        begun = now - (time.monotonic() - self._begun)  # the clock may have been set since
        known = {"PLACEMENT": course.requested, "START": course.placed, "RENDEZVOUS": begun, "": now}
        times = [(name, begin) for name, begin in known.items() if begin is not None]
        return [Step(name, begin, end) for (name, begin), (_, end) in pairwise(times) if begin < end]
