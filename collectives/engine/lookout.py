"""Reports tensors that wait too long."""

from __future__ import annotations

import logging
from typing import Protocol

from collectives.api import CollectiveTimeoutError
from collectives.planning.stalls import Pending, StallInspector

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

    ``deadline`` is the time of the next look, in monotonic seconds; None when no tensor waited at the last one.
    """

    def __init__(self, stalls: StallInspector | None) -> None:
        self._stalls = stalls
        self.deadline: float | None = None

    def look(self, observed: Observed, now: float) -> CollectiveTimeoutError | None:
        """Report waiting tensors of ``observed`` if it is time; returns the error that must end the job, if any."""
        if self.deadline is None:
            if self._stalls is not None and observed.is_waiting:
                self.deadline = now + self._stalls.patience
            return None
        return self._look(observed.waiting(), now) if now >= self.deadline else None

    def _look(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        fatal = self.report(waiting, now)
        self.deadline = None if self._stalls is None else self._stalls.deadline(waiting)
        return fatal

    def report(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        """Report the due tensors of ``waiting``; returns the error that must end the job, if any."""
        report = self._stalls.inspect(waiting, now) if self._stalls is not None else None
        if report is None or report.text is None:
            return None
        if report.fatal:
            return CollectiveTimeoutError(report.text, report.ranks)
        logger.warning("%s", report.text)
        return None

    def answer(self, observed: Observed, now: float) -> str:
        """The answer to a rank's inquiry: the tensors of ``observed`` that have waited for long; empty if none has."""
        return "" if self._stalls is None else self._stalls.answer(observed.waiting(), now)
