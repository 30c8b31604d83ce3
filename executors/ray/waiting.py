"""Waits for one call on several ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

import cloudpickle
import ray
from ray import ObjectRef
from ray.exceptions import RayError

from executors.api import StartTimeoutError, WorkerError
from executors.outcome import Outcome, values
from executors.ray.group import Member

__all__ = ["Gathering"]

GRACE_S = 5.0
TICK_S = 10.0
FETCH_S = 60.0


class Gathering:
    """The outcomes of one call, as they come in.

    The death of a worker ends the wait at once. An exception ends it after a grace of a few seconds, in which the other
    workers may finish, too, or report the cause: the error of a rank that lost its peer often arrives before Ray
    reports the peer's death.
    """

    def __init__(self, calls: Mapping[ObjectRef[bytes], Member], timeout: float = math.inf) -> None:
        self.pending = dict(calls)
        self.lost: WorkerError | None = None
        self._dead: Member | None = None
        self._outcomes: list[Outcome] = []
        self._deadline = time.monotonic() + timeout

    @property
    def summary(self) -> str:
        """Why the call did not end everywhere, in a few words."""
        if self.lost is not None:
            return f"{self._dead} died"
        silent = sorted(member.slot.rank for member in self.pending.values())
        raised = sorted(outcome.rank for outcome in self._outcomes if outcome.failed)
        return f"ranks {raised} raised and ranks {silent} had not returned {GRACE_S:g} s later"

    @property
    def complete(self) -> bool:
        """Whether every worker returned or raised, so that all of them are free for another call."""
        return not self.pending and self.lost is None

    def wait(self) -> None:
        """Return when all workers have answered, when one has died, or when the time has run out."""
        while self.pending and self.lost is None and (left := self._deadline - time.monotonic()) > 0:
            done, _ = ray.wait(list(self.pending), num_returns=1, timeout=min(TICK_S, left))
            for reference in done:
                self._take(reference, self.pending.pop(reference))

    def values(self) -> list[object]:
        """The values by rank, or the error at the root of the failure: a death, else the first exception that is no
        consequence of another rank's failure."""
        if self.lost is not None:
            raise self.lost
        results = values(self._outcomes)
        if self.pending:
            raise StartTimeoutError(f"{next(iter(self.pending.values()))} did not answer in time (timeout_s)")
        return results

    def _take(self, reference: ObjectRef[bytes], member: Member) -> None:
        try:
            outcome: Outcome = cloudpickle.loads(ray.get(reference, timeout=FETCH_S))
        except RayError as error:
            self.lost, self._dead = _death(member, error), member
            return
        self._outcomes.append(outcome)
        if outcome.failed:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)


def _death(member: Member, cause: RayError) -> WorkerError:
    error = WorkerError(f"{member} died: {cause}", member.slot.rank, member.slot.host)
    error.__cause__ = cause
    return error
