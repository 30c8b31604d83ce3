"""On rank 0: ends calls of one name and different kinds that wait for each other for ever."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collectives.planning.coordinator import Coordinator
from collectives.planning.crossings import Crossing, is_certain
from collectives.planning.survey import Survey

__all__ = ["Arbiter"]

PATIENCE_SECONDS = 1.0
"""Calls that have waited for less are left alone, so that a busy job has hardly any cost."""
ANSWER_SECONDS = 0.5
"""A rank that waits in a call answers within this time; otherwise it gets a few times as long."""
LONGEST_SECONDS = 5.0
"""Then the ranks are asked again."""


class Arbiter:
    """Asks the ranks of a crossing where they stand: only they know whether they can still make the other call.

    ``ask`` sends the question to ranks, and ``survey`` gets the answers. ``deadline`` is the time of the next look, in
    monotonic seconds; None when callers waited for one tensor or none at the last one.
    """

    def __init__(self, survey: Survey, ask: Callable[[Sequence[int]], None]) -> None:
        self._survey = survey
        self._ask = ask
        self._asked: float | None = None
        self.deadline: float | None = None

    def look(self, coordinator: Coordinator, now: float) -> None:
        """End the crossings of which the ranks have told that they are certain; ask about the others."""
        if self.deadline is None:
            if coordinator.may_cross:
                self.deadline = now + PATIENCE_SECONDS
        elif now >= self.deadline:
            if self._asked is None:
                self._question(coordinator, now)
            else:
                self._judge(coordinator, self._asked, now)

    def _question(self, coordinator: Coordinator, now: float) -> None:
        crossings = coordinator.crossings(now - PATIENCE_SECONDS)
        for rank in sorted({rank for crossing in crossings for rank in crossing.submitted}):
            self._ask(self._survey.ask((rank,), now))
        self._asked = now if crossings else None
        self._plan(coordinator, now, ANSWER_SECONDS if crossings else PATIENCE_SECONDS)

    def _judge(self, coordinator: Coordinator, asked: float, now: float) -> None:
        is_complete = True
        for crossing in coordinator.crossings(asked):
            if self._is_certain(crossing, asked):
                coordinator.end_crossing(crossing)
            else:
                is_complete = is_complete and all(self._survey.answer(rank, asked) for rank in crossing.submitted)
        is_over = is_complete or now >= asked + LONGEST_SECONDS
        self._asked = None if is_over else asked
        self._plan(coordinator, now, PATIENCE_SECONDS if is_over else ANSWER_SECONDS)

    def _is_certain(self, crossing: Crossing, asked: float) -> bool:
        answers = (self._survey.answer(rank, asked) for rank in crossing.submitted)
        return is_certain(crossing, [answer for answer in answers if answer is not None])

    def _plan(self, coordinator: Coordinator, now: float, seconds: float) -> None:
        self.deadline = now + seconds if coordinator.may_cross else None
