"""One job: the agents of its driver are the loop that watches the workers of this host, and the agents of others."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType

from collectives import LOOPBACK, override, usable_cores
from executors.agents.hosts.remote import AgentPlan, AgentReporter, OtherHosts
from executors.agents.hosts.shell import RemoteShell
from executors.agents.local.job import BY_SIGNAL, CommandProgram, FunctionProgram, ProcessJob, Program
from executors.agents.local.processes import passed_on
from executors.agents.local.supervisor import (
    GRACE_SECONDS,
    Ended,
    Supervisor,
    Unheard,
    WorkerStarted,
    ending_signal,
)
from executors.agents.local.task import search_path
from executors.agents.local.work import NOT_STARTED, CallWork, CommandWork, WorkerPayload
from executors.api import ExecutorError, number_of
from executors.dashboard.picture import Address
from executors.job.arguments import resolve_seconds
from executors.job.discovery import HostDiscovery, HostWatch
from executors.job.environment import shared_threads
from executors.job.host import address_for, is_this_host
from executors.job.job import Job
from executors.job.output import Output, say
from executors.membership import Limits

logger = logging.getLogger(__name__)

HOST = "localhost"
START_TIMEOUT_SECONDS = 30.0
NO_SHELL = "give --remote-shell to start ranks on other hosts"


@dataclass(frozen=True, slots=True)
class HostsOptions:
    """How to run a job on hosts.

    ``environment`` is added to that of this process and of the job, and must not set the variables that place a worker.
    The workers have ``start_timeout`` seconds to come up, and ``grace`` seconds between being asked to end and being
    killed. ``output_directory`` and ``timestamp`` are those of :class:`executors.job.output.Output`;
    ``verbose`` prints on standard error which process is which rank. ``discovery`` finds the hosts while the job runs;
    ``hosts`` are those of a static job, with the slots that it takes, in the order of the ranks; without both, it is
    this host, with as many slots as the job needs at most. ``shell`` starts the agents of other hosts; without it, they
    are not used. ``dashboard`` is where the live page is served; None: there is none.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = START_TIMEOUT_SECONDS
    grace: float = GRACE_SECONDS
    output_directory: str | Path | None = None
    timestamp: bool = False
    verbose: bool = False
    discovery: HostDiscovery | None = None
    hosts: Mapping[str, int] | None = None
    shell: RemoteShell | None = None
    dashboard: Address | None = None


class HostsJob(ProcessJob, AgentReporter):
    """One job, from the rendezvous server to the last worker: a context manager.

    A failure ends a static job, and so the other workers. Leaving the block ends the workers that still run, see
    :class:`executors.agents.local.supervisor.Supervisor`, and raises the failure, if there was one. Of several failures
    it raises the likeliest cause.
    """

    def __init__(self, limits: Limits, options: HostsOptions, work: WorkerPayload, program: Program) -> None:
        output = Output(limits.size, options.output_directory, options.timestamp)
        job = Job(limits.size, _address(options))
        super().__init__(limits, job, program, output, options.start_timeout, options.dashboard)
        self._options = options
        self._work = work
        self._hosts = _named(options.hosts or {})
        self._has_begun = False
        self._has_supervisor = False
        self._unheard: set[int] = set()
        self._wanted: set[str] = set()  # of the other hosts
        self._unused: set[str] = set()
        self._wanted_here = 0
        self._others: OtherHosts | None = None
        # A discovery may find any number of slots; with more ranks than cores, each has one thread in any case.
        ranks = self._hosts.get(HOST, 1) if self._hosts else min(limits.most, max(limits.size, usable_cores()))
        self._threads = shared_threads({**os.environ, **options.environment}, usable_cores(), ranks)

    @override
    def _open(self, stack: ExitStack) -> None:
        super()._open(stack)
        self._launch = stack.enter_context(self._work.opened())
        self._supervisor = self._loop = stack.enter_context(Supervisor(self._options.grace))
        self._has_supervisor = True
        if self._options.shell is not None:
            self._others = stack.enter_context(self._other_hosts(self._options.shell))
        stack.push(self._leave)

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if error is None:
            self.driver.check()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask the workers of all hosts to end where a signal ends the job, and wait for them and their output."""
        self._is_leaving = True
        if self._others is None or not isinstance(error, KeyboardInterrupt | SystemExit):
            return
        try:
            self._others.end(None, ending_signal(error))
            self._supervisor.leave(ending_signal(error), self._others.leave)
        except BaseException:
            self._others.hurry()
            self._supervisor.hurry()
            raise

    def run(self) -> None:
        """Return when every worker has ended and none will be started."""
        self._find_hosts()
        for event in self._supervisor.events(self._is_over):
            if event.rank >= 0:
                self.happened(event)
            elif isinstance(event, Ended) and self._others is not None:
                self._others.agent_ended(event)

    def pass_on(self, number: int) -> None:
        """Send the workers that have a handler the signal ``number``, soon; from a handler of signals, at any time."""
        if self._has_supervisor:
            self.soon(lambda: self._pass_on(number))
        else:
            self._missed(number)

    def _pass_on(self, number: int) -> None:
        self._has_hung_up |= number == signal.SIGHUP
        is_heard = self._supervisor.pass_on(number)
        if not (self._others is not None and self._others.pass_on(number)) and not is_heard and not self._is_leaving:
            self._missed(number)

    def _missed(self, number: int) -> None:
        if number == signal.SIGHUP:  # the terminal is closed
            raise SystemExit(BY_SIGNAL + number)
        logger.warning("%s came before a rank was there that could heed it", signal.Signals(number).name)

    # Agents.

    @override
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """A static job raises OSError where no process can be started."""
        number, given = self.number(worker), self.variables(environment, self._options.environment)
        if self._others is None or host == HOST:
            self._start_here(number, {**os.environ, **given, **self._threads})
        else:
            self._others.start(number, host, given)

    def _start_here(self, number: int, environment: Mapping[str, str]) -> None:
        try:
            self._launch(self._supervisor, number, environment, self._outputs)
        except OSError as error:
            if not self._limits.is_elastic:
                raise
            self.soon(partial(self.not_started, number, NOT_STARTED.format(error)))

    @override
    def stop(self, worker: str) -> None:
        self._supervisor.stop(number_of(worker))
        if self._others is not None:
            self._others.stop(number_of(worker))

    @override
    def kill(self, worker: str) -> None:
        self._supervisor.kill(number_of(worker))
        if self._others is not None:
            self._others.kill(number_of(worker))

    @override
    def end(self, spare: str | None = None) -> None:
        number = None if spare is None else number_of(spare)
        self._supervisor.end(number)
        if self._others is not None:
            self._others.end(number)

    # Hosts.

    def _find_hosts(self) -> None:
        if self._options.discovery is not None:
            self._stack.enter_context(HostWatch(self._options.discovery, self._found, self.soon))
        elif self._hosts:
            if self._others is not None:
                self._others.wanted({name: count for name, count in self._hosts.items() if name != HOST})
            self.agents_changed()
        else:
            self.driver.found({HOST: self._limits.most})

    def _found(self, slots: Mapping[str, int]) -> None:
        others = {name: count for name, count in slots.items() if not is_this_host(name)}
        self._wanted_here = sum(slots.values()) - sum(others.values())
        for name in self._wanted - others.keys():
            self.driver.host_unusable(name, None)
        self._wanted = set(others)
        if self._others is not None:
            self._others.wanted(others)
        else:
            self._do_without(others)
        self.agents_changed()

    def _do_without(self, hosts: Iterable[str]) -> None:
        for name in hosts:
            self.driver.host_unusable(name, NO_SHELL)
            if name not in self._unused:
                logger.warning("host %s is not used: %s", name, NO_SHELL)
            self._unused.add(name)

    @override
    def agents_changed(self) -> None:
        if self._is_leaving:
            return
        ready = {} if self._others is None else self._others.ready()
        if not self._hosts:
            self.driver.found(({HOST: self._wanted_here} if self._wanted_here else {}) | ready)
        elif not self._has_begun and self._hosts.keys() <= {HOST, *ready}:
            self._has_begun = True
            self.driver.found(self._hosts)

    @override
    def host_lost(self, host: str, text: str) -> None:
        if not self._is_leaving:
            super().host_lost(host, text)

    @override
    def host_unusable(self, host: str, text: str) -> None:
        """A static job needs all of its hosts at the start."""
        if self._is_leaving:
            return
        told = f"host {host} cannot be used: {text}"
        if self._hosts and not self._has_begun:
            raise ExecutorError(told)
        logger.warning(told)
        if host in self._wanted:
            self.driver.host_unusable(host, text)

    def _other_hosts(self, shell: RemoteShell) -> OtherHosts:
        plan = AgentPlan(shell, self._work, self._options.start_timeout, self._options.grace, self._limits.most)
        return OtherHosts(self._job, plan, self._supervisor, self._outputs, self)

    def _is_over(self) -> bool:
        return self.driver.is_over and (self._others is None or self._others.leave())

    # Events.

    @override
    def not_started(self, number: int, text: str) -> None:
        if not self._is_leaving:
            super().not_started(number, text)

    @override
    def _started(self, event: WorkerStarted) -> None:
        if self._options.verbose:
            host = self.driver.host_of(self.workers[event.rank])
            size = "" if self._limits.is_elastic else f" of {self._limits.size}"
            say(f"{self._name(event.rank)}{size} is process {event.pid} on {host}")
        super()._started(event)

    @override
    def _not_heard(self, event: Unheard) -> None:
        """Say it once for each signal, with the first of its workers."""
        if event.number not in self._unheard:
            name = signal.Signals(event.number).name
            logger.warning("%s has no handler for %s, and goes on without it", self._name(event.rank), name)
        self._unheard.add(event.number)

    def _name(self, number: int) -> str:
        return self.workers[number] if self._limits.is_elastic else f"rank {number}"


def _named(hosts: Mapping[str, int]) -> dict[str, int]:
    """``hosts`` with one name for this host, also if it has several of its names."""
    named: dict[str, int] = {}
    for name, count in hosts.items():
        known = HOST if is_this_host(name) else name
        named[known] = named.get(known, 0) + count
    return named


def _address(options: HostsOptions) -> str:
    """The address of this host for the others: on the way to the first of them where the hosts are known."""
    if options.shell is None:
        return LOOPBACK
    return address_for(options.hosts or (), {**os.environ, **options.environment})


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
    job = HostsJob(limits, options, work, CommandProgram())
    with passed_on(job.pass_on), job:
        job.run()


def resolve_start_timeout(seconds: float | None) -> float:
    """``seconds``, or else HOROVOD_START_TIMEOUT, or else 30. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "start_timeout", "HOROVOD_START_TIMEOUT", START_TIMEOUT_SECONDS)


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
    with HostsJob(limits, options, work, FunctionProgram()) as job:
        job.run()
    return job.values()
