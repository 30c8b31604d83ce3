"""A job whose workers are processes with numbers, on this host or on others: their events, output and programs."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from collectives import override
from executors.agents.local.supervisor import (
    TEARDOWN_SECONDS,
    Ended,
    Event,
    MessageReceived,
    Unheard,
    WorkerStarted,
    ended,
)
from executors.api import number_of
from executors.dashboard.picture import Address
from executors.driver.job import LiveJob
from executors.driver.outcome import Outcome
from executors.failures import Failure, FailureKind
from executors.job.job import Job
from executors.job.output import Output
from executors.membership import Limits

# A shell says 128 + n for a command that signal n ended.
BY_SIGNAL = 128


class Program(Protocol):
    """Handles the events of the workers of a job; workers have numbers."""

    def started(self, job: ProcessJob, number: int) -> None:
        """Its process has started."""

    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """It sent ``message``."""

    def failure(self, job: ProcessJob, event: Ended) -> Failure | None:
        """The failure of a worker whose process ended; None if it did its work."""


class CommandProgram(Program):
    """A command: it is up when its process is, and did its work if that ends with exit code 0."""

    @override
    def started(self, job: ProcessJob, number: int) -> None:
        job.driver.up(job.workers[number])

    @override
    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """A command sends none."""

    @override
    def failure(self, job: ProcessJob, event: Ended) -> Failure | None:
        return None if event.code == 0 else ended(event)


class FunctionProgram(Program):
    """A function: it is up when it has imported its modules, and sends its outcome, which counts at its end."""

    @override
    def started(self, job: ProcessJob, number: int) -> None:
        """It says itself when it is up."""

    @override
    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """An empty message says that it is up, the other one has its outcome."""
        worker = job.workers[number]
        if not message:
            job.driver.up(worker)
            return
        outcome: Outcome = pickle.loads(message)
        job.outcomes[worker] = outcome
        if outcome.failed:
            job.driver.failed(worker, outcome.failure())
        elif set(job.driver.members) <= job.outcomes.keys():
            job.after(TEARDOWN_SECONDS, job.end)

    @override
    def failure(self, job: ProcessJob, event: Ended) -> Failure | None:
        outcome = job.outcomes.get(job.workers[event.rank])
        if outcome is None:
            return ended(event, " before its function returned")
        return replace(outcome.failure(), exit_code=event.code) if outcome.failed else None


class ProcessJob(LiveJob):
    """A job of ``program``, whose workers write to ``output``; see :class:`executors.driver.job.LiveJob`."""

    def __init__(
        self,
        limits: Limits,
        job: Job,
        program: Program,
        output: Output,
        start_timeout: float,
        page: Address | None,
        name: str = "hvdrun",
        machine: Callable[[str], str] = str,
    ) -> None:
        super().__init__(limits, job, start_timeout, page, name, machine)
        self.workers: dict[int, str] = {}  # by their numbers
        self._program = program
        self._output = output
        self._is_leaving = self._has_hung_up = False

    @override
    def _open(self, stack: ExitStack) -> None:
        stack.enter_context(self._output)
        self._outputs = self._dashboard.watched(self._output)

    def number(self, worker: str) -> int:
        """The number of the process of ``worker``, which is about to start."""
        number = number_of(worker)
        self.workers[number] = worker
        return number

    def happened(self, event: Event) -> None:
        """``event`` happened to a worker, on this host or on another one. A job that a signal ends ignores it."""
        if self._is_leaving:
            return
        if isinstance(event, WorkerStarted):
            self._started(event)
        elif isinstance(event, MessageReceived):
            self._program.received(self, event.rank, event.message)
        elif isinstance(event, Ended):
            self._ended(event)
        else:
            self._not_heard(event)

    def _not_heard(self, event: Unheard) -> None:
        """A worker has no handler for a signal that was passed on."""

    def _started(self, event: WorkerStarted) -> None:
        self._program.started(self, event.rank)

    def not_started(self, number: int, text: str) -> None:
        """Worker ``number`` could not be started."""
        self.driver.failed(self.workers[number], Failure(FailureKind.EXIT, text, has_begun=False))

    def host_lost(self, host: str, text: str) -> None:
        """``host`` is lost, with its workers."""
        self.driver.host_lost(host, text, self._has_returned)

    def _has_returned(self, worker: str) -> bool:
        """Whether it did its work, however its process ends."""
        outcome = self.outcomes.get(worker)
        return outcome is not None and not outcome.failed

    def _ended(self, event: Ended) -> None:
        """A closed terminal ends a job whose ranks have no handler of SIGHUP, also an elastic one."""
        hung_up = event.code in (-signal.SIGHUP, BY_SIGNAL + signal.SIGHUP)
        if hung_up and self._has_hung_up and not self.driver.is_over:
            raise SystemExit(BY_SIGNAL + signal.SIGHUP)
        worker, failure = self.workers[event.rank], self._program.failure(self, event)
        if failure is None:
            self.driver.done(worker)
        else:
            self.driver.failed(worker, failure)
