"""One call on several ranks: a static job whose workers are the calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress

import cloudpickle
import ray
from ray import ObjectRef
from ray.exceptions import RayError

from collectives import override
from executors.agents.ray.group import JobActor
from executors.api import StartTimeoutError, WorkerError, worker_id
from executors.driver.driver import Driver
from executors.driver.job import JobShell
from executors.driver.outcome import Outcome, values
from executors.failures import Failure, FailureKind, Patience
from executors.job.job import Job
from executors.job.loop import Loop
from executors.membership import Limits

GRACE_S = 5.0
TICK_S = 10.0
FETCH_S = 60.0

Send = Callable[[JobActor, Mapping[str, str]], "ObjectRef[bytes]"]
"""Sends the call to a worker that has this environment in the job; the value is a pickled outcome."""


class CallOnRanks(JobShell):
    """One call on ``members``, by rank.

    The death of a worker ends the wait at once. An exception ends it after a grace of a few seconds, in which the other
    workers may finish, too, or report the cause: the error of a rank that lost its peer often arrives before Ray
    reports the peer's death.
    """

    _loop: Loop

    def __init__(self, members: Sequence[JobActor], send: Send, job: Job, timeout: float = math.inf) -> None:
        super().__init__()
        self._members = {worker_id(number): member for number, member in enumerate(members)}
        self._send = send
        self._timeout = timeout
        self._pending: dict[ObjectRef[bytes], str] = {}
        self._dead: JobActor | None = None
        self._has_given_up = False
        self._loop = Loop()
        limits, patience = Limits.static(max(1, len(members))), Patience(GRACE_S, GRACE_S)
        self.driver = Driver(limits, job, self, math.inf, patience=patience)

    @property
    def summary(self) -> str:
        """Why the call did not end everywhere, in a few words."""
        if self._dead is not None:
            return f"{self._dead} died"
        silent = sorted(self._members[worker].slot.rank for worker in self._pending.values())
        raised = sorted(outcome.rank for outcome in self.outcomes.values() if outcome.failed)
        return f"ranks {raised} raised and ranks {silent} had not returned {GRACE_S:g} s later"

    @property
    def complete(self) -> bool:
        """Whether every worker returned or raised, so that all of them are free for another call."""
        return not self._pending and self._dead is None

    def wait(self, tick: float = TICK_S) -> None:
        """Send the calls. Return when all workers have answered, when one has died, or when the time has run out.

        Calls what :meth:`soon` gets, every ``tick`` seconds at least, and once more at the end.
        """
        # Ray's own wait: its callbacks, one for each worker, take a millisecond longer.
        self.after(self._timeout, self.end)
        with closing(self.driver):
            self.driver.found(Counter(member.location.node for member in self._members.values()))
            self._wait(tick)

    def _wait(self, tick: float) -> None:
        due = self._loop.call_due()
        while self._pending and not self._has_given_up:
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=max(0.0, min(tick, due)))
            for reference in done:
                self._take(reference, self._pending.pop(reference))
            due = self._loop.call_due()

    def values(self) -> list[object]:
        """The values by rank, or the error at the root of the failure: a death, else the first exception that is no
        consequence of another rank's failure."""
        self.driver.check()
        results = values(self.outcomes.values())
        if self._pending:
            raise StartTimeoutError(
                f"{self._members[next(iter(self._pending.values()))]} did not answer in time (timeout_s)"
            )
        return results

    # Agents.

    @override
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        self._pending[self._send(self._members[worker], environment)] = worker

    @override
    def stop(self, worker: str) -> None:
        """A call has nothing to hand over."""
        self.kill(worker)

    @override
    def kill(self, worker: str) -> None:
        with suppress(RayError):
            ray.kill(self._members[worker].actor)

    @override
    def end(self, spare: str | None = None) -> None:
        """The owner of the actors kills them."""
        self._has_given_up = True

    def _take(self, reference: ObjectRef[bytes], worker: str) -> None:
        member = self._members[worker]
        try:
            outcome: Outcome = cloudpickle.loads(ray.get(reference, timeout=FETCH_S))
        except RayError as error:
            self._dead = self._dead or member
            self.driver.failed(worker, Failure(FailureKind.DEATH, "died", error=_death(member, error)))
            return
        self.outcomes[worker] = outcome
        self.report(worker, outcome)


def _death(member: JobActor, cause: RayError) -> WorkerError:
    error = WorkerError(f"{member} died: {cause}", member.slot.rank, member.slot.host)
    error.__cause__ = cause
    return error
