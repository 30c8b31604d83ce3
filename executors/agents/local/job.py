"""A job whose workers are processes with numbers, on this host or on others: their events, output and programs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Protocol

from collectives.api import override
from executors.agents.local.supervisor import TEARDOWN_SECONDS, Ended, Event, MessageReceived, WorkerStarted, ended
from executors.api import worker_id
from executors.dashboard.picture import Address
from executors.driver.job import LiveJob
from executors.driver.outcome import Outcome
from executors.failures import Failure, FailureKind
from executors.job.job import Job
from executors.job.output import Output, Tails
from executors.membership import Limits


class Program(Protocol):
    """Handles the events of the workers of a job; workers have numbers."""

    def started(self, job: ProcessJob, number: int) -> None:
        """Its process has started."""

    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """It sent ``message``."""

    def failure(self, job: ProcessJob, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        """The failure of a worker whose process ended with ``code``; None if it did its work."""


class CommandProgram(Program):
    """A command: it is up when its process is, and did its work if that ends with exit code 0."""

    @override
    def started(self, job: ProcessJob, number: int) -> None:
        job.driver.up(worker_id(number))

    @override
    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """A command sends none."""

    @override
    def failure(self, job: ProcessJob, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        return None if code == 0 else ended(code, last_lines)


class FunctionProgram(Program):
    """A function: it is up when it has imported its modules, and sends its outcome, which counts at its end."""

    @override
    def started(self, job: ProcessJob, number: int) -> None:
        """It says itself when it is up."""

    @override
    def received(self, job: ProcessJob, number: int, message: bytes) -> None:
        """An empty message says that it is up, the other one has its outcome."""
        worker = worker_id(number)
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
    def failure(self, job: ProcessJob, number: int, code: int, last_lines: tuple[str, ...]) -> Failure | None:
        outcome = job.outcomes.get(worker_id(number))
        if outcome is None:
            return ended(code, last_lines, " before its function returned")
        return replace(outcome.failure(), exit_code=code) if outcome.failed else None


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
        self._program = program
        self._output = output

    @override
    def _open(self, stack: ExitStack) -> None:
        stack.enter_context(self._output)
        self._tails = Tails(self._dashboard.watched(self._output))

    def happened(self, event: Event) -> None:
        """``event`` happened to a worker."""
        if isinstance(event, WorkerStarted):
            self._program.started(self, event.rank)
        elif isinstance(event, MessageReceived):
            self._program.received(self, event.rank, event.message)
        elif isinstance(event, Ended):
            self._ended(event)

    def not_started(self, number: int, text: str) -> None:
        """Worker ``number`` could not be started."""
        self.driver.failed(worker_id(number), Failure(FailureKind.EXIT, text, has_begun=False))

    def host_lost(self, host: str, text: str) -> None:
        """``host`` is lost, with its workers."""
        self.driver.host_lost(host, text, self._has_returned)

    def _has_returned(self, worker: str) -> bool:
        """Whether it did its work, however its process ends."""
        outcome = self.outcomes.get(worker)
        return outcome is not None and not outcome.failed

    def _ended(self, event: Ended) -> None:
        worker = worker_id(event.rank)
        failure = self._program.failure(self, event.rank, event.code, self._tails.last_lines(event.rank))
        if failure is None:
            self.driver.done(worker)
        else:
            self.driver.failed(worker, failure)
