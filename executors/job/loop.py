"""The loop in which the driver of an elastic job, and all that reports to it, is called."""

from __future__ import annotations

import heapq
import itertools
import math
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Action = Callable[[], None]

# Only how long one wait lasts: an action from another thread ends it at once.
LONGEST_WAIT_S = 10.0


class Loop:
    """Calls actions one after the other, in the thread of :meth:`run`; other threads may call :meth:`soon`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._calls: queue.SimpleQueue[Action] = queue.SimpleQueue()
        self._alarms: list[_Alarm] = []
        self._serial = itertools.count()

    def soon(self, action: Action) -> None:
        """Call ``action`` after those that wait already; from any thread."""
        self._calls.put(action)

    def after(self, seconds: float, action: Action) -> None:
        """Call ``action`` in ``seconds``; from the thread of the loop."""
        heapq.heappush(self._alarms, _Alarm(self._clock() + seconds, next(self._serial), action))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Call actions until ``is_over()``; what an action raises ends the loop."""
        while not is_over():
            action = self._next()
            if action is not None:
                action()

    def call_due(self) -> float:
        """Call the actions that wait, without waiting; the seconds until the next one that is known, or inf."""
        for _ in range(self._calls.qsize()):
            self._calls.get()()
        while self._alarms and self._alarms[0].at <= self._clock():
            heapq.heappop(self._alarms).action()
        return self._alarms[0].at - self._clock() if self._alarms else math.inf

    def _next(self) -> Action | None:
        wait = self._alarms[0].at - self._clock() if self._alarms else LONGEST_WAIT_S
        if wait <= 0:
            return heapq.heappop(self._alarms).action
        try:
            return self._calls.get(timeout=min(wait, LONGEST_WAIT_S))
        except queue.Empty:
            return None


@dataclass(frozen=True, slots=True, order=True)
class _Alarm:
    at: float
    serial: int
    action: Action = field(compare=False)
