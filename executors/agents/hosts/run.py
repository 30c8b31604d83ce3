"""A command, or a function and its results back, on the workers of a job of hosts."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from executors.agents.hosts.job import START_TIMEOUT_SECONDS, HostsJob, HostsOptions
from executors.agents.local.processes import passed_on
from executors.agents.local.supervisor import TEARDOWN_SECONDS, ended
from executors.agents.local.work import CallWork, CommandWork, search_path
from executors.api import worker_id
from executors.driver.driver import Driver
from executors.driver.outcome import Outcome
from executors.job.arguments import resolve_seconds
from executors.membership import Limits
from executors.membership.failures import Failure


class FunctionJob(Protocol):
    """The job of a function, as its outcomes need it."""

    driver: Driver

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        pass

    def end(self, spare: str | None = None) -> None:
        pass


class FunctionOutcomes:
    """Handles the events of workers that run a function; workers have numbers."""

    def __init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}

    def started(self, job: FunctionJob, number: int) -> None:
        """Its process has started; it is up when it has imported its modules, and says so."""

    def received(self, job: FunctionJob, number: int, message: bytes) -> None:
        """It sent ``message``: an empty one says that it is up, the other one has its outcome."""
        worker = worker_id(number)
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
        outcome = self._outcomes.get(worker_id(number))
        if outcome is None:
            return ended(code, last_lines, " before its function returned")
        return replace(outcome.failure(), exit_code=code) if outcome.failed else None

    def has_returned(self, number: int) -> bool:
        """Whether the function has returned a value."""
        outcome = self._outcomes.get(worker_id(number))
        return outcome is not None and not outcome.failed

    def values(self, order: Sequence[str]) -> list[object]:
        """The values of the workers that returned one, in ``order``. Raises WorkerError for one that cannot be read.

        The job did not fail. If a worker of it did, as a newcomer that came when the others were done, it has no value.
        """
        outcomes = (self._outcomes[worker] for worker in order if worker in self._outcomes)
        return [outcome.unwrap() for outcome in outcomes if not outcome.failed]


def run_command(command: Sequence[str], limits: Limits, options: HostsOptions) -> None:
    """Run ``command`` on workers within ``limits``; return when all of them ended with exit code 0.

    In a static job, a worker that ends otherwise ends the others. Raises WorkerError for the likeliest cause, see
    :class:`executors.driver.driver.Driver`; CommandNotFoundError before anything is started, StartTimeoutError,
    ExecutorError for too few workers, and OSError if a process or an output file cannot be made. In the main thread,
    SIGUSR1, SIGUSR2 and SIGHUP are passed on to the workers that have a handler, until all have ended; raises
    SystemExit where SIGHUP ended a worker.
    """
    work = CommandWork(tuple(command))
    work.check(options.environment)
    job = HostsJob(limits, options, work, _Command())
    with passed_on(job.pass_on), job:
        job.run()


def resolve_start_timeout(seconds: float | None) -> float:
    """``seconds``, or else HOROVOD_START_TIMEOUT, or else 30. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "start_timeout", "HOROVOD_START_TIMEOUT", START_TIMEOUT_SECONDS)


class _Command:
    def started(self, job: HostsJob, number: int) -> None:
        job.driver.up(worker_id(number))

    def received(self, job: HostsJob, number: int, message: bytes) -> None:
        """A command sends none."""

    def failure(self, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        return None if code == 0 else ended(code, last_lines)

    def has_returned(self, number: int) -> bool:
        return False


def run_function(
    call: bytes, limits: Limits, options: HostsOptions, executable: str | os.PathLike[str] | None = None
) -> list[object]:
    """Run ``call``, of :func:`executors.job.call.pickle_call`, on workers of ``executable`` (this Python).

    Returns the results by rank: in an elastic job, the ranks of the world in which the first worker was done. In a
    static job, a worker that fails ends the others. Raises the exception of the function as itself, with a RemoteError
    as its cause, WorkerError for a worker that died, StartTimeoutError, CommandNotFoundError where there is no such
    Python, ExecutorError for too few workers, and OSError where a process or an output file cannot be made. Of several
    failures it raises the likeliest cause, see :class:`executors.driver.driver.Driver`.
    """
    path = search_path({**os.environ, **options.environment}.get("PYTHONPATH"))
    work = CallWork(call, os.fspath(executable or sys.executable), path)
    work.check(options.environment)
    outcomes = FunctionOutcomes()
    with HostsJob(limits, options, work, outcomes) as job:
        job.run()
    return outcomes.values(job.driver.order)
