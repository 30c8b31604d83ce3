"""Looks out for tensors that wait too long."""

from __future__ import annotations

import logging
from typing import Protocol

from collectives.api import CollectiveTimeoutError
from collectives.planning.stalls import Pending, StallInspector

__all__ = ["Lookout", "Observed"]

logger = logging.getLogger(__name__)


class Observed(Protocol):
    """What a lookout looks at."""

    @property
    def is_waiting(self) -> bool:
        """Whether anything waits."""

    def waiting(self) -> Pending:
        """What waits for which ranks."""


class Lookout:
    """Reports what waits, at planned times, so that a busy job pays nothing for it. Without ``stalls``, never.

    ``deadline`` is the time of the next look, in monotonic seconds; None when nothing waited at the last one.
    """

    def __init__(self, stalls: StallInspector | None) -> None:
        self._stalls = stalls
        self.deadline: float | None = None

    def look(self, observed: Observed, now: float) -> CollectiveTimeoutError | None:
        """Report what waits in ``observed`` if it is time to; returns the error that the job must end with, if any."""
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
        """Report what is due about ``waiting``; returns the error that the job must end with, if any."""
        report = self._stalls.inspect(waiting, now) if self._stalls is not None else None
        if report is None or report.text is None:
            return None
        if report.fatal:
            return CollectiveTimeoutError(report.text, report.ranks)
        logger.warning("%s", report.text)
        return None

    def answer(self, observed: Observed, now: float) -> str:
        """For a rank that asks: what waits in ``observed`` for long; empty where nothing does."""
        return "" if self._stalls is None else self._stalls.answer(observed.waiting(), now)
