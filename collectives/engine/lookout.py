"""Reports tensors that wait too long."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from collectives.api import CollectiveTimeoutError
from collectives.engine.investigation import Investigation
from collectives.events import EventStream, Stalled
from collectives.logs import about
from collectives.planning.stalls import StallInspector
from collectives.planning.waiting import Key, Pending, Waiting

__all__ = ["Lookout", "Observed"]

logger = logging.getLogger(__name__)


class Observed(Protocol):
    """The object that a lookout inspects."""

    @property
    def is_waiting(self) -> bool:
        """Whether any tensor waits."""

    def waiting(self) -> Pending:
        """The tensors that wait, and the ranks that each waits for."""


class Lookout:
    """Reports tensors that wait, at planned times, so that a busy job has no cost. Without ``stalls``, never.

    It logs them and publishes them on ``events``. On rank 0, its ``investigation`` of the missing ranks comes first.
    ``deadline`` is the time of the next look, in monotonic seconds; None
    when no tensor waited at the last one.
    """

    def __init__(
        self, stalls: StallInspector | None, events: EventStream, investigation: Investigation | None = None
    ) -> None:
        self._stalls = stalls
        self._investigation = investigation
        self._events = events
        self.deadline: float | None = None

    def look(self, observed: Observed, now: float) -> CollectiveTimeoutError | None:
        """Report waiting tensors of ``observed`` if it is time; returns the error that must end the job, if any."""
        if self.deadline is None:
            if self._stalls is not None and observed.is_waiting:
                self.deadline = now + self._stalls.patience
            return None
        return self._look(observed.waiting(), now) if now >= self.deadline or self._investigates else None

    def _look(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        fatal = self.report(waiting, now)
        self.deadline = self._next_look(waiting)
        return fatal

    @property
    def _investigates(self) -> float | None:
        """When an investigation ends at the latest; None where there is none now."""
        return None if self._investigation is None else self._investigation.deadline

    def _next_look(self, waiting: Pending) -> float | None:
        if self._stalls is None:
            return None
        return self._investigates or self._stalls.deadline(waiting)

    def report(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        """Report the due tensors of ``waiting``; returns the error that must end the job, if any.

        While an investigation takes its time, the report is still to come.
        """
        if self._stalls is None:
            return None
        if self._investigation is not None:
            waiting = self._investigation.cleared(waiting)
        found = self._find(self._stalls, waiting, now)
        report = None if found is None else self._stalls.inspect(waiting, now, found)
        if report is None or report.text is None:
            return None
        if Stalled in self._events.wanted:
            self._publish(waiting, report.keys, now)
        if report.fatal:
            return CollectiveTimeoutError(report.text, report.ranks)
        logger.warning("%s", report.text, extra=about([name for _, name in report.keys]))
        return None

    def _find(self, stalls: StallInspector, waiting: Pending, now: float) -> Sequence[str] | None:
        """Texts about the missing ranks of the due tensors; None while they are still to come."""
        if self._investigation is None:
            return ()
        return self._investigation.find(stalls.missing(waiting, now), now)

    def _publish(self, waiting: Pending, keys: Sequence[Key], now: float) -> None:
        for process_set, name in keys:
            tensor = waiting[process_set, name]
            self._events.publish(Stalled(name, process_set, tensor.missing, now - tensor.since, now))

    def note(self, since: Mapping[Key, float], missing: tuple[int, ...], now: float) -> None:
        """Tell observers that rank 0, or this rank in its place, has reported that tensors of this rank wait.

        ``since`` is when each tensor in flight was submitted.
        """
        if self._stalls is None or Stalled not in self._events.wanted:
            return
        waiting = {key: Waiting(time, missing, ()) for key, time in since.items()}
        self._publish(waiting, [key for key in waiting if now - since[key] >= self._stalls.patience], now)

    def answer(self, observed: Observed, now: float) -> str:
        """The answer to a rank's inquiry: the tensors of ``observed`` that have waited for long; empty if none has."""
        return "" if self._stalls is None else self._stalls.answer(observed.waiting(), now)
