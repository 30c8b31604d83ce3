"""The shell of a job of any kind: its driver, its loop, the outcomes of its functions, its server and its page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Protocol, TypeVar

from collectives import override
from executors.dashboard.dashboard import Dashboard
from executors.dashboard.picture import Address
from executors.driver.driver import Agents, Driver
from executors.driver.outcome import Outcome
from executors.job.environment import interface_variables
from executors.job.job import Job
from executors.membership import Limits

T = TypeVar("T", bound="LiveJob")


class Scheduler(Protocol):
    """A loop that calls actions, one after the other."""

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` in ``seconds``; from the thread of the loop."""

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` after those that wait already; from any thread."""


class JobShell(Agents):
    """The loop of a job, and the outcomes of its functions by worker.

    A kind of job adds how its workers start and end. It sets ``_loop`` and ``driver``.
    """

    driver: Driver
    _loop: Scheduler

    def __init__(self) -> None:
        self.outcomes: dict[str, Outcome] = {}

    @override
    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._loop.after(seconds, action)

    @override
    def soon(self, action: Callable[[], None]) -> None:
        self._loop.soon(action)

    def report(self, worker: str, outcome: Outcome) -> None:
        """The function of ``worker`` has ended, and so does its work."""
        if outcome.failed:
            self.driver.failed(worker, outcome.failure())
        else:
            self.driver.done(worker, "returned")


class LiveJob(JobShell):
    """The driver of ``job``, with a server and a page of its own: a context manager that leaves no worker behind.

    Workers have ``start_timeout`` seconds to come up. ``page`` is where the live page is served, None for no page;
    ``name`` is what its line on standard error begins with. ``machine`` and ``withdraws`` are those of
    :class:`executors.driver.driver.Driver`.
    """

    def __init__(
        self,
        limits: Limits,
        job: Job,
        start_timeout: float,
        page: Address | None,
        name: str = "hvd_cluster",
        machine: Callable[[str], str] = str,
        withdraws: Callable[[str], bool] = lambda worker: False,
    ) -> None:
        super().__init__()
        self._limits = limits
        self._job = job
        self._start_timeout = start_timeout
        self._dashboard = Dashboard(job, page, name)
        self._machine = machine
        self._withdraws = withdraws
        self._stack = ExitStack()

    def __enter__(self: T) -> T:
        with ExitStack() as stack:
            stack.enter_context(self._job)
            stack.enter_context(self._dashboard)
            self._open(stack)
            self.driver = Driver(
                self._limits,
                self._job,
                self,
                self._start_timeout,
                machine=self._machine,
                withdraws=self._withdraws,
            )
            stack.callback(self.driver.close)
            self._begin(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _open(self, stack: ExitStack) -> None:
        """Enter on ``stack`` what outlives the driver."""

    def _begin(self, stack: ExitStack) -> None:
        """Enter on ``stack`` what ends before the driver."""

    def variables(self, place: Mapping[str, str], own: Mapping[str, str], nics: Sequence[str] = ()) -> dict[str, str]:
        """The environment of a worker: its network interfaces, its ``place``, the page, and the user's ``own``."""
        return {**interface_variables(nics), **place, **self._dashboard.variables(), **own}

    def values(self) -> list[object]:
        """The values of the functions by rank, in the world in which the first worker was done.

        The job did not fail. If a worker of it did, as a newcomer that came when the others were done, it has no value.
        Raises WorkerError for a value that cannot be read.
        """
        outcomes = (self.outcomes[worker] for worker in self.driver.order if worker in self.outcomes)
        return [outcome.unwrap() for outcome in outcomes if not outcome.failed]
