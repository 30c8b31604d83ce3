"""The hosts of a job other than this one: an agent on each starts and ends the workers there."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import Protocol

from collectives import ENVIRONMENT_SECRET, override
from executors.agents.hosts.agent_server import AgentConnection, AgentServer, Listener, WorkerReporter, dispatch
from executors.agents.hosts.messages import (
    SAME_VERSIONS,
    AgentLaunch,
    AgentLeave,
    AgentStop,
    Begin,
    EndAll,
    FromAgent,
    Kill,
    PassOn,
)
from executors.agents.hosts.shell import RemoteShell, script
from executors.agents.local.supervisor import Ended, Supervisor, Tail, WorkerStarted, longest_end
from executors.agents.local.task import search_path
from executors.agents.local.work import WorkerPayload
from executors.job.environment import packed, shared, startup
from executors.job.job import Job, secret_variable
from executors.job.output import Lines, Sink, Sinks, SinkTable, TeeSink

logger = logging.getLogger(__name__)

FIRST_WAIT_SECONDS = 1.0
LONGEST_WAIT_SECONDS = 60.0
MOST_DOUBLINGS = 10
SHOWN_LINES = 3
LOST_ADVICE = "look at that host and at its network; it is tried again"
OWN_ADVICE = "look at the limits and at the disks of the host of this process"


@dataclass(frozen=True, slots=True)
class AgentPlan:
    """The work of agents, and their start: ``shell`` runs them, and each has ``seconds`` seconds to connect.

    Workers have ``grace`` seconds between the request to end and the kill; at most ``most`` of them run.
    """

    shell: RemoteShell
    work: WorkerPayload
    seconds: float
    grace: float
    most: int


class AgentReporter(WorkerReporter, Protocol):
    """Hears of other hosts, in the loop of the supervisor."""

    def agents_changed(self) -> None:
        """A host has got an agent, or lost it."""

    def host_unusable(self, host: str, text: str) -> None:
        """``host`` got no agent; it is tried again later. May raise what ends the job."""

    def host_lost(self, host: str, text: str) -> None:
        """``host`` is lost, with its workers."""


class _Phase(Enum):
    STARTING = auto()
    UP = auto()
    WAITING = auto()  # its agent could not start, or was lost; another one is started later
    LEAVING = auto()


@dataclass(slots=True)
class _Host:
    name: str
    slots: int
    number: int
    phase: _Phase = _Phase.STARTING
    link: AgentConnection | None = None
    workers: set[int] = field(default_factory=set)
    failures: int = 0
    said: str = ""
    output: Tail = field(default_factory=Tail)


class OtherHosts(Listener):
    """Agents on the hosts that are :meth:`wanted`: a context manager.

    They are processes of ``supervisor`` with negative numbers. All methods are called in the loop of the supervisor,
    and so are those of ``reporter``. ``output`` gets what the workers write.
    """

    def __init__(
        self, job: Job, plan: AgentPlan, supervisor: Supervisor, output: Sinks, reporter: AgentReporter
    ) -> None:
        self._job = job
        self._plan = plan
        self._supervisor = supervisor
        self._reporter = reporter
        self._hosts: dict[str, _Host] = {}
        self._numbers = itertools.count(-1, -1)
        self._sinks = SinkTable(output)
        self._agent_server = AgentServer(job.host, job.secret, self)
        self._stack = ExitStack()

    def __enter__(self) -> OtherHosts:
        self._stack.enter_context(self._agent_server)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._hosts.values():
            host.slots = 0
            if host.link is None:
                self._supervisor.kill(host.number)
                host.phase = _Phase.LEAVING
        self._stack.__exit__(kind, error, trace)
        self._sinks.close()

    def wanted(self, slots: Mapping[str, int]) -> None:
        """The job may use these hosts. An agent on another host stays as long as it has workers."""
        for name, count in slots.items():
            host = self._hosts.get(name)
            if host is None:
                self._hosts[name] = self._start_agent(_Host(name, count, 0))
            else:
                host.slots = count
        for host in [host for name, host in self._hosts.items() if name not in slots]:
            host.slots = 0
            self._dismiss_if_free(host)

    def ready(self) -> dict[str, int]:
        """The slots of each wanted host that has an agent."""
        return {host.name: host.slots for host in self._hosts.values() if host.phase is _Phase.UP and host.slots}

    def start(self, number: int, host: str, environment: Mapping[str, str]) -> None:
        """Start worker ``number`` on ``host``."""
        place = self._hosts[host]
        place.workers.add(number)
        if place.link is None:
            self._reporter.not_started(number, f"was not started, because the agent of host {host} is lost")
        else:
            shown = {name: value for name, value in environment.items() if name != ENVIRONMENT_SECRET}
            place.link.send(AgentLaunch(number, shown))

    def stop(self, number: int) -> None:
        """Ask worker ``number`` to end. Does nothing if it is on no other host."""
        self._tell(number, AgentStop(number))

    def kill(self, number: int) -> None:
        """Kill worker ``number``. Does nothing if it is on no other host."""
        self._tell(number, Kill(number))

    def pass_on(self, number: int) -> bool:
        """Send all workers the signal ``number``; whether there is one."""
        self._tell_all(PassOn(number))
        return any(host.workers for host in self._hosts.values())

    def hurry(self) -> None:
        """Kill all workers now."""
        for number in [number for host in self._hosts.values() for number in host.workers]:
            self.kill(number)

    def end(self, spare: int | None, number: int = signal.SIGTERM) -> None:
        """Ask all workers to end by ``number``, ``spare`` last. A host that does not obey counts as lost."""
        self._tell_all(EndAll(spare, number))
        self._supervisor.after(longest_end(self._plan.grace), self._give_up_workers)

    def leave(self) -> bool:
        """End the agents without workers; whether no worker is left."""
        for host in self._hosts.values():
            host.slots = 0
            self._dismiss_if_free(host)
        return not any(host.workers for host in self._hosts.values())

    def agent_ended(self, event: Ended) -> None:
        """The process of an agent has ended; if it had connected, the end of the connection says so, too."""
        host = next((host for host in self._hosts.values() if host.number == event.rank), None)
        if host is None or host.link is not None:
            return
        if host.phase is _Phase.STARTING:
            advice = self._plan.shell.advice(host.name, os.environ, event.code)
            self._give_up(host, f"its agent ended with exit code {event.code} before it connected", advice)
        elif host.phase is _Phase.LEAVING:
            self._left(host)

    # Agents.

    def _start_agent(self, host: _Host) -> _Host:
        host.number, host.phase, host.output = next(self._numbers), _Phase.STARTING, Tail()
        try:
            self._launch(host)
        except OSError as error:
            self._give_up(host, f"its agent could not be started ({error})", OWN_ADVICE)
        else:
            self._supervisor.after(self._plan.seconds, partial(self._check_up, host, host.number))
        return host

    def _launch(self, host: _Host) -> None:
        command = [
            sys.executable,
            "-m",
            "executors.agents.hosts.agent",
            host.name,
            self._job.host,
            str(self._agent_server.port),
        ]
        with tempfile.TemporaryFile() as file:
            file.write(os.fsencode(script(os.getcwd(), self._variables(), command)))
            file.seek(0)
            self._supervisor.launch(
                host.number,
                self._plan.shell.command(host.name),
                os.environ,
                _AgentOutput(host.name, host.output),
                stdin=file.fileno(),
                in_background=True,
            )

    def _variables(self) -> dict[str, str]:
        own = os.environ | {"PYTHONPATH": search_path(os.environ.get("PYTHONPATH"))}
        return startup(own) | packed(shared(own) | secret_variable(self._job.secret))

    def _check_up(self, host: _Host, number: int) -> None:
        if host.phase is _Phase.STARTING and host.number == number:
            self._supervisor.kill(number)
            self._give_up(host, f"its agent did not connect within {self._plan.seconds:g} s")

    def _give_up(self, host: _Host, text: str, advice: str = "") -> None:
        """Try again later, as long as the host is wanted. By default the advice is to try the remote shell."""
        host.phase, host.link = _Phase.WAITING, None
        shown = "; ".join(host.output.text()[-SHOWN_LINES:])
        text = f"{text} ({shown})" if shown else text
        wait = min(FIRST_WAIT_SECONDS * 2.0 ** min(host.failures, MOST_DOUBLINGS), LONGEST_WAIT_SECONDS)
        host.failures += 1
        if text != host.said:
            advice = advice or self._plan.shell.advice(host.name, os.environ)
            self._reporter.host_unusable(host.name, f"{text}; {advice}")
        host.said = text
        self._supervisor.after(wait, partial(self._try_again, host))

    def _try_again(self, host: _Host) -> None:
        if host.phase is not _Phase.WAITING:
            return
        if not host.slots:
            del self._hosts[host.name]
            return
        self._start_agent(host)

    def _dismiss_if_free(self, host: _Host) -> None:
        if host.workers or host.slots or host.phase in (_Phase.LEAVING, _Phase.WAITING):
            return
        if host.link is None:
            self._supervisor.kill(host.number)
        else:
            host.link.send(AgentLeave())
            self._supervisor.after(longest_end(self._plan.grace), partial(self._supervisor.kill, host.number))
        host.phase = _Phase.LEAVING

    def _left(self, host: _Host) -> None:
        """The agent of ``host`` is gone, as it should; the host may be wanted again."""
        del self._hosts[host.name]
        if host.slots:
            self._hosts[host.name] = self._start_agent(_Host(host.name, host.slots, 0))

    def _give_up_workers(self) -> None:
        """The agents whose workers have not ended in time count as lost."""
        for host in self._hosts.values():
            if host.workers and host.link is not None:
                host.link.close()

    def _tell_all(self, message: EndAll | PassOn) -> None:
        for host in self._hosts.values():
            if host.link is not None:
                host.link.send(message)

    def _tell(self, number: int, message: AgentStop | Kill) -> None:
        host = self._host_of(number)
        if host is not None and host.link is not None:
            host.link.send(message)

    def _host_of(self, number: int) -> _Host | None:
        return next((host for host in self._hosts.values() if number in host.workers), None)

    # In the thread of the agent server.

    @override
    def connected(self, link: AgentConnection) -> None:
        self._supervisor.soon(lambda: self._connected(link))

    @override
    def received(self, link: AgentConnection, message: FromAgent) -> None:
        self._supervisor.soon(lambda: self._received(message))

    @override
    def disconnected(self, link: AgentConnection, text: str) -> None:
        self._supervisor.soon(lambda: self._disconnected(link, text))

    # Messages of agents, in the loop.

    def _connected(self, link: AgentConnection) -> None:
        host = self._hosts.get(link.hello.host)
        if host is None or host.phase is not _Phase.STARTING:
            link.close()
            return
        if link.hello.mismatch:
            link.close()
            self._supervisor.kill(host.number)
            self._give_up(host, link.hello.mismatch, SAME_VERSIONS)
            return
        host.phase, host.link = _Phase.UP, link
        link.send(Begin(self._plan.work, min(host.slots, self._plan.most), self._plan.grace))
        self._reporter.agents_changed()

    def _received(self, message: FromAgent) -> None:
        if isinstance(message, WorkerStarted) and (host := self._host_of(message.rank)) is not None:
            host.failures, host.said = 0, ""
        dispatch(message, self._sinks, self._gone, self._reporter)

    def _gone(self, number: int) -> None:
        host = self._host_of(number)
        if host is not None:
            host.workers.discard(number)
            self._dismiss_if_free(host)

    def _disconnected(self, link: AgentConnection, text: str) -> None:
        host = next((host for host in self._hosts.values() if host.link is link), None)
        if host is None:
            return
        host.link, host.workers = None, set()
        self._supervisor.kill(host.number)  # a remote shell does not notice that a link is cut
        if host.phase is _Phase.LEAVING:
            self._left(host)
            return
        self._give_up(host, text, LOST_ADVICE)
        self._reporter.host_lost(host.name, text)
        self._reporter.agents_changed()


class _AgentOutput:
    """The destination of what the process of an agent writes itself, such as the errors of ssh: the log.

    ``tail`` keeps the last lines of its standard error.
    """

    def __init__(self, host: str, tail: Tail) -> None:
        self._host = host
        self._tail = tail

    def sink(self, rank: int, name: str) -> Sink:
        sink = _LogSink(self._host)
        return TeeSink(sink, self._tail) if name == "stderr" else sink


class _LogSink:
    def __init__(self, host: str) -> None:
        self._host = host
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        self._log(self._lines.feed(data))

    def close(self) -> None:
        self._log(self._lines.flush())

    def _log(self, lines: Iterator[bytes]) -> None:
        for line in lines:
            logger.warning("host %s: %s", self._host, line.decode("utf-8", "replace").rstrip())
