"""A function on ranks that mpirun starts, and its results back over connections of their own."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from collectives import LOOPBACK
from executors.agents.hosts.agent_server import AgentConnection, AgentServer
from executors.agents.hosts.messages import Begin, FromAgent
from executors.agents.local.supervisor import (
    GRACE_SECONDS,
    TEARDOWN_SECONDS,
    Ended,
    MessageReceived,
    Supervisor,
    WorkerStarted,
    kind_of_end,
)
from executors.agents.local.task import search_path
from executors.agents.local.work import CallWork
from executors.agents.mpi.launch import MpiConsole, environment_of, mpirun_of, start_launcher
from executors.agents.mpi.mpirun import MpiJob
from executors.api import ExecutorError, JobSecret, StartTimeoutError, WorkerError
from executors.driver.outcome import Outcome, values
from executors.failures import CAUSE_SECONDS, Failure, with_last_lines
from executors.job.host import address_for, is_this_host
from executors.job.job import secret_variable
from executors.job.output import say
from executors.membership.deaths import Failures


@dataclass(frozen=True, slots=True)
class MpiOptions:
    """How to run a function by mpirun.

    ``variables`` are added to the environment of the ranks, which have ``start_timeout`` seconds to come up.
    ``is_verbose`` shows the command, and which process is which rank. ``python`` is that of the ranks.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 30.0
    is_verbose: bool = False
    python: str = sys.executable


def run_function_by_mpi(call: bytes, job: MpiJob, options: MpiOptions) -> list[object]:
    """Run ``call``, of :func:`executors.job.call.pickle_call`, on the ranks of ``job``, which is without a command.

    Returns the results by rank. Raises the exception of the function as itself, with a RemoteError as its cause;
    WorkerError for a rank that died, StartTimeoutError, CommandNotFoundError where there is no mpirun or Python,
    ExecutorError where mpirun fails, and OSError. Of several failures it raises the likeliest cause.
    """
    secret = JobSecret()
    given = {**os.environ, **options.variables}
    path = {"PYTHONPATH": search_path(given.get("PYTHONPATH"))}
    environment = environment_of(job, {**options.variables, **path, **secret_variable(secret)})
    address = LOOPBACK if all(map(is_this_host, job.hosts)) else address_for(job.hosts, given)
    with ExitStack() as stack:
        supervisor = stack.enter_context(Supervisor())
        ranks = _Ranks(supervisor, CallWork(call), job, options)
        port = stack.enter_context(AgentServer(address, secret, ranks)).port
        task = [options.python, "-m", "executors.agents.mpi.task", address, str(port), str(job.size)]
        whole = replace(job, command=task)
        command = mpirun_of(whole, environment)
        start_launcher(supervisor, whole, command.words, command.variables, MpiConsole(), options.is_verbose)
        supervisor.after(options.start_timeout, ranks.check_up)
        for event in supervisor.events(ranks.are_gone):
            if isinstance(event, Ended):
                ranks.launcher_ended(event)
    return ranks.values()


class _Ranks:
    """The ranks of ``job``, as their connections tell; all but the first three methods are for the loop of
    ``supervisor``."""

    def __init__(self, supervisor: Supervisor, work: CallWork, job: MpiJob, options: MpiOptions) -> None:
        self._supervisor = supervisor
        self._work = work
        self._job = job
        self._options = options
        self._links: dict[AgentConnection, int | None] = {}
        self._hosts: dict[int, str] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._lost: list[int] = []
        self._is_ended = False
        self._code: int | None = None
        self._last_lines: tuple[str, ...] = ()

    # In the thread of the agent server.

    def connected(self, link: AgentConnection) -> None:
        self._supervisor.soon(lambda: self._connected(link))

    def received(self, link: AgentConnection, message: FromAgent) -> None:
        self._supervisor.soon(lambda: self._received(link, message))

    def disconnected(self, link: AgentConnection, text: str) -> None:
        self._supervisor.soon(lambda: self._disconnected(link))

    # In the loop.

    def check_up(self) -> None:
        """Raise StartTimeoutError if ranks are missing."""
        missing = ", ".join(str(rank) for rank in range(self._job.size) if rank not in self._hosts)
        if missing:
            raise StartTimeoutError(
                f"of {self._job.size} ranks on {', '.join(self._job.hosts)}, mpirun did not bring up these within "
                f"{self._options.start_timeout:g} s: {missing}; raise the start timeout if a host is slow "
                "(start_timeout or HOROVOD_START_TIMEOUT)"
            )

    def are_gone(self) -> bool:
        """Whether no rank is connected."""
        return not self._links

    def launcher_ended(self, event: Ended) -> None:
        """A rank that outlives the launcher has the time of grace. One that was asked to end has no exit code."""
        self._supervisor.after(GRACE_SECONDS, self._cut)
        self._code, self._last_lines = None if self._is_ended else event.code, event.last_lines

    def values(self) -> list[object]:
        """The results by rank. Raises the likeliest failure."""
        failures = Failures()
        for rank, outcome in self._outcomes.items():
            if outcome.failed:
                failures.add(f"rank {rank}", rank, outcome.failure())
        if len(self._outcomes) < self._job.size:
            failures.add("mpirun", None, self._without())
        if failures:
            failure = failures.cause.failure
            raise failure.error or ExecutorError(failure.text)
        return values(self._outcomes.values())

    def _without(self) -> Failure:
        """The failure of the first rank that was lost, or else of mpirun itself."""
        code = self._code
        how = "" if code is None else f"mpirun ended with exit code {code}"
        kind = kind_of_end(code or 0, ())
        if not self._lost:
            text = f"{how or 'mpirun ended'} before its ranks were up"
            return Failure(kind, with_last_lines(text, self._last_lines))
        rank = self._lost[0]
        text = f"rank {rank} on {self._hosts[rank]} ended before its function returned{how and f'; {how}'}"
        return Failure(kind, text, error=WorkerError(text, rank, self._hosts[rank], code, self._last_lines))

    def _connected(self, link: AgentConnection) -> None:
        problem = link.hello.mismatch
        if problem:
            raise ExecutorError(f"a rank on {link.hello.host} cannot be used: {problem}; install the same versions")
        self._links[link] = None
        link.send(Begin(self._work, 1, GRACE_SECONDS))

    def _received(self, link: AgentConnection, message: FromAgent) -> None:
        if isinstance(message, WorkerStarted):
            self._links[link], self._hosts[message.rank] = message.rank, link.hello.host
            if self._options.is_verbose:
                say(f"rank {message.rank} of {self._job.size} is process {message.pid} on {link.hello.host}")
        elif isinstance(message, MessageReceived):
            outcome = self._outcomes[message.rank] = pickle.loads(message.message)
            if outcome.failed:
                self._end_after(CAUSE_SECONDS)
            elif len(self._outcomes) == self._job.size:
                self._end_after(TEARDOWN_SECONDS)

    def _disconnected(self, link: AgentConnection) -> None:
        rank = self._links.pop(link, None)
        if rank is not None and rank not in self._outcomes:
            self._lost.append(rank)
            self._end_after(CAUSE_SECONDS)

    def _end_after(self, seconds: float) -> None:
        """mpirun ends all ranks when one fails; this is for a rank that fails without an exit code."""
        self._supervisor.after(seconds, self._end)

    def _end(self) -> None:
        self._is_ended = True
        self._supervisor.end()

    def _cut(self) -> None:
        for link in self._links:
            link.close()
