"""On rank 0: finds out where the missing ranks stand before a report about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from collectives.planning.survey import Survey
from collectives.planning.waiting import Pending
from collectives.planning.whereabouts import ProcessState

__all__ = ["Investigation", "States"]

States = Callable[[Sequence[int]], Mapping[int, ProcessState]]
"""The states of the processes of ranks, of those that are on this host."""
ANSWER_SECONDS = 1.0
"""A rank that runs has answered within this time. The report does not wait for longer."""


class Investigation:
    """For one lookout. ``ask`` sends the question to ranks, and ``survey`` gets the answers.

    ``deadline`` is when :meth:`find` ends at the latest, in monotonic seconds; None where it has not begun.
    """

    def __init__(self, survey: Survey, ask: Callable[[Sequence[int]], None], states: States) -> None:
        self._survey = survey
        self._ask = ask
        self._states = states
        self._since: float | None = None

    @property
    def deadline(self) -> float | None:
        """See the class."""
        return None if self._since is None else self._since + ANSWER_SECONDS

    def cleared(self, pending: Pending) -> Pending:
        """See :meth:`Survey.cleared`, by the answers of the present investigation."""
        return pending if self._since is None else self._survey.cleared(pending, self._since)

    def find(self, ranks: Sequence[int], now: float) -> list[str] | None:
        """Where ``ranks`` stand, a text for each; None while answers may still come. Without ranks it begins anew."""
        if not ranks:
            self._since = None
            return []
        if self._since is None:
            self._since = now
        since = self._since
        self._ask(self._survey.ask(ranks, since))
        if now < since + ANSWER_SECONDS and not self._survey.is_complete(ranks, since):
            return None
        self._since = None
        return self._survey.describe(ranks, since, self._states(ranks))
