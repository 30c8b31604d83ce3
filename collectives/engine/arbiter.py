"""On rank 0: ends calls that wait for each other for ever, of one name and different kinds, or of different names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from collectives.planning.coordinator import Coordinator
from collectives.planning.crossings import is_certain
from collectives.planning.standstills import standstill, suspects
from collectives.planning.survey import Survey
from collectives.planning.whereabouts import Whereabouts

__all__ = ["Arbiter"]

PATIENCE_SECONDS = 1.0
"""Calls that have waited for less are left alone, so that a busy job has hardly any cost."""
ANSWER_SECONDS = 0.5
"""A rank that waits in a call answers within this time; otherwise it gets a few times as long."""
LONGEST_SECONDS = 5.0
"""Then the ranks are asked again."""


class Arbiter:
    """Asks the ranks of such calls where they stand: only they know whether they can still make another call.

    ``ask`` sends the question to ranks, and ``survey`` gets the answers. ``deadline`` is the time of the next look, in
    monotonic seconds; None when callers waited for one tensor or none at the last one.
    """

    def __init__(self, survey: Survey, ask: Callable[[Sequence[int]], None]) -> None:
        self._survey = survey
        self._ask = ask
        self._asked: float | None = None
        self.deadline: float | None = None

    def look(self, coordinator: Coordinator, now: float) -> None:
        """End the calls of which the ranks have told that it is certain; ask about the others."""
        if self.deadline is None:
            if coordinator.may_cross:
                self.deadline = now + PATIENCE_SECONDS
        elif now >= self.deadline:
            if self._asked is None:
                self._question(coordinator, now)
            else:
                self._judge(coordinator, self._asked, now)

    def _question(self, coordinator: Coordinator, now: float) -> None:
        ranks = _ranks(coordinator, now - PATIENCE_SECONDS)
        for rank in ranks:
            self._ask(self._survey.ask((rank,), now))
        self._asked = now if ranks else None
        self._plan(coordinator, now, ANSWER_SECONDS if ranks else PATIENCE_SECONDS)

    def _judge(self, coordinator: Coordinator, asked: float, now: float) -> None:
        for crossing in coordinator.crossings(asked):
            if is_certain(crossing, self._answers(crossing.submitted, asked)):
                coordinator.fail(crossing.keys, crossing.why)
        awaited = coordinator.awaited(asked)
        found = standstill(awaited, self._answers(suspects(awaited), asked))
        if found is not None:
            coordinator.fail(found.keys, found.why)
        ranks = _ranks(coordinator, asked)
        is_over = len(self._answers(ranks, asked)) == len(ranks) or now >= asked + LONGEST_SECONDS
        self._asked = None if is_over else asked
        self._plan(coordinator, now, PATIENCE_SECONDS if is_over else ANSWER_SECONDS)

    def _answers(self, ranks: Iterable[int], asked: float) -> list[Whereabouts]:
        answers = (self._survey.answer_to(rank, asked) for rank in ranks)
        return [answer for answer in answers if answer is not None]

    def _plan(self, coordinator: Coordinator, now: float, seconds: float) -> None:
        self.deadline = now + seconds if coordinator.may_cross else None


def _ranks(coordinator: Coordinator, before: float) -> list[int]:
    """The ranks in calls that may wait for each other, submitted ``before`` a time; usually there are none."""
    crossing = {rank for crossing in coordinator.crossings(before) for rank in crossing.submitted}
    return sorted(crossing | suspects(coordinator.awaited(before)))
