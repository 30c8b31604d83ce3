"""The outcomes of a function on the workers of a job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from executors.driver import Driver
from executors.failure import Failure
from executors.local.ends import TEARDOWN_SECONDS, ended
from executors.outcome import Outcome

__all__ = ["FunctionJob", "Outcomes"]


class FunctionJob(Protocol):
    """The job of a function, as its outcomes need it."""

    driver: Driver

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """See :class:`executors.agents.Agents`."""

    def end(self, spare: str | None = None) -> None:
        """See :class:`executors.agents.Agents`."""


class Outcomes:
    """Handles the events of workers that run a function; workers have numbers."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}

    def started(self, job: FunctionJob, number: int) -> None:
        """Its process has started; it is up when it has imported its modules, and says so."""

    def received(self, job: FunctionJob, number: int, message: bytes) -> None:
        """It sent ``message``: an empty one says that it is up, the other one has its outcome."""
        worker = f"worker-{number}"
        if not message:
            job.driver.up(worker)
            return
        outcome: Outcome = pickle.loads(message)
        self._outcomes[worker] = outcome
        if outcome.failed:
            job.driver.failed(worker, outcome.failure())
        elif set(job.driver.members) <= self._outcomes.keys():
            job.after(TEARDOWN_SECONDS, job.end)

    def failure(self, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        """The failure of a worker whose process ended with ``code``; None if it did its work."""
        outcome = self._outcomes.get(f"worker-{number}")
        if outcome is None:
            return ended(code, last_lines, " before its function returned")
        return replace(outcome.failure(), exit_code=code) if outcome.failed else None

    def has_returned(self, number: int) -> bool:
        """Whether the function has returned a value."""
        outcome = self._outcomes.get(f"worker-{number}")
        return outcome is not None and not outcome.failed

    def values(self, order: Sequence[str]) -> list[object]:
        """The values of the workers that returned one, in ``order``. Raises WorkerError for one that cannot be read.

        The job did not fail. If a worker of it did, as a newcomer that came when the others were done, it has no value.
        """
        outcomes = (self._outcomes[worker] for worker in order if worker in self._outcomes)
        return [outcome.unwrap() for outcome in outcomes if not outcome.failed]
