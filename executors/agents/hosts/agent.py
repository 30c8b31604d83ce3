"""The agent of a host: ``python -m executors.agents.hosts.agent HOST ADDRESS PORT``.

It connects to the driver at ADDRESS and PORT, starts and ends the workers of HOST as the driver says, and sends their
output and their ends. When it loses the driver, it ends the workers. The secret of the job is in its environment.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from types import FrameType, MappingProxyType
from typing import NoReturn

from collectives import descriptors, end_in_silence, usable_cores, wire
from executors.agents.hosts.messages import (
    AgentFailed,
    AgentHello,
    AgentLaunch,
    AgentLeave,
    AgentStop,
    Begin,
    EndAll,
    FromAgent,
    FromDriver,
    Kill,
    PassOn,
    Wrote,
)
from executors.agents.local.supervisor import Pipe, Supervisor
from executors.agents.local.work import NOT_STARTED
from executors.agents.local.work import Launch as LaunchWorker
from executors.api import ExecutorError, JobSecret
from executors.job.environment import thread_variables, unpack
from executors.job.job import secret_of, secret_variable
from executors.job.output import Sink, release_consoles, say

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 20.0
# The kernel ends a connection to a host that was silent for so long: its workers, or this driver, count as lost.
SILENCE_SECONDS = 3.5
READ_BYTES = 1 << 16
REFUSED = "the driver closed the connection; its log says why"


class AgentLink:
    """The connection of an agent to its driver; one thread uses it. Raises OSError, or PermissionError of a stranger.

    Sending waits for no longer than SILENCE_SECONDS without progress; the kernel ends the connection then.
    """

    def __init__(self, sock: socket.socket, secret: JobSecret, host: str) -> None:
        self.secret = secret
        self._socket = sock
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._sealer, self._opener = wire.introduce(sock, secret.key, AgentHello(host).encode(), REFUSED)
        end_in_silence(sock, SILENCE_SECONDS)
        sock.settimeout(None)

    def first(self) -> list[FromDriver]:
        """The first message of the driver, and those that came with it.

        The driver sends it at once, but sends none to a task of Spark that it refuses.
        """
        messages: list[FromDriver] = []
        while not messages:
            # Bound: that of a silent driver, or the end of the job; abort: the driver closes the connection.
            data = self._socket.recv(READ_BYTES)
            if not data:
                raise ConnectionAbortedError(REFUSED)
            messages = self.open(data)
        return messages

    def open(self, data: bytes) -> list[FromDriver]:
        """The messages that ``data`` completes. Raises PermissionError for a forged one."""
        return [pickle.loads(content) for content in self._opener.feed(data)]

    def send(self, message: FromAgent) -> None:
        """Send ``message``; if the driver is lost, it is dropped."""
        try:
            self._send_all(self._sealer.seal(pickle.dumps(message)))
        except OSError:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self, data: bytes) -> None:
        """The supervisor reads the same connection without waiting, so a full buffer is an error here."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._writable.poll()  # Bound and abort: the kernel, after SILENCE_SECONDS without progress.

    def descriptor(self) -> int:
        """A descriptor of its own to read from, which the caller closes."""
        return os.dup(self._socket.fileno())


def serve(link: AgentLink, inherited: Sequence[int] = (), variables: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start and end workers as the driver says, until it says that this agent shall leave.

    The workers inherit ``inherited``, and have ``variables`` in their environment.

    Raises ConnectionAbortedError if the driver is lost; the workers have ended then.
    """
    begin, *others = link.first()
    if not isinstance(begin, Begin):
        raise ConnectionAbortedError(f"the driver began with {begin!r}")
    with ExitStack() as stack:
        launch = stack.enter_context(begin.work.opened(inherited))
        supervisor = stack.enter_context(Supervisor(begin.grace))
        agent = _Agent(link, supervisor, begin, launch, variables)
        for message in others:
            agent.obey(message)
        supervisor.attach(Pipe(link.descriptor(), agent))
        for event in supervisor.events(lambda: agent.is_leaving):
            link.send(event)
    if agent.has_lost_driver:
        raise ConnectionAbortedError("the driver was lost")


class _Agent:
    """Executes the messages of the driver: the sink of the data that come from it."""

    def __init__(
        self, link: AgentLink, supervisor: Supervisor, begin: Begin, launch: LaunchWorker, variables: Mapping[str, str]
    ) -> None:
        self.is_leaving = False
        self.has_lost_driver = False
        self._link = link
        self._supervisor = supervisor
        self._begin = begin
        self._launch = launch
        self._variables = variables

    def feed(self, data: bytes) -> None:
        for message in self._link.open(data):
            self.obey(message)

    def close(self) -> None:
        """The driver has ended, or is lost: so shall the workers."""
        self.has_lost_driver = not self.is_leaving
        self.is_leaving = True
        self._supervisor.end()

    def sink(self, number: int, name: str) -> Sink:
        return _Output(self._link, number, name)

    def obey(self, message: FromDriver) -> None:
        """Do what the driver says."""
        if isinstance(message, AgentLaunch):
            self._start(message)
        elif isinstance(message, AgentStop):
            self._supervisor.stop(message.number)
        elif isinstance(message, Kill):
            self._supervisor.kill(message.number)
        elif isinstance(message, EndAll):
            self._supervisor.end(message.spare, message.signal)
        elif isinstance(message, PassOn):
            self._supervisor.pass_on(message.signal)
        elif isinstance(message, AgentLeave):
            self.is_leaving = True

    def _start(self, message: AgentLaunch) -> None:
        environment = {**os.environ, **message.environment, **self._variables, **secret_variable(self._link.secret)}
        threads = thread_variables(environment, usable_cores(), self._begin.ranks)
        try:
            self._launch(self._supervisor, message.number, {**environment, **threads}, self)
        except OSError as error:
            self._link.send(AgentFailed(message.number, NOT_STARTED.format(error)))


class _Output:
    def __init__(self, link: AgentLink, number: int, stream: str) -> None:
        self._write = partial(Wrote, number, stream)
        self._link = link

    def feed(self, data: bytes) -> None:
        self._link.send(self._write(data))

    def close(self) -> None:
        self._link.send(self._write(b""))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    """Serve the driver of the command line."""
    host, address, port = sys.argv[1:]
    unpack(os.environ)
    secret = secret_of(os.environ)
    descriptors.raise_limit()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a batch system that signals all processes means the ranks
        signal.signal(number, lambda *_: None)
    try:
        with closing(socket.create_connection((address, int(port)), CONNECT_SECONDS)) as sock:
            serve(AgentLink(sock, secret, host))
    except (OSError, ExecutorError) as error:
        say(f"the agent of host {host} cannot serve the driver at {address} port {port}: {error}", "hvd-agent")
        release_consoles()  # the remote shell may have ended, too
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
