"""The driver's end of the connections from the agents of other hosts."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Protocol

from collectives import Opener, Sealer, end_in_silence, frames
from executors.agents.hosts.agent import SILENCE_SECONDS
from executors.agents.hosts.messages import AgentFailed, AgentHello, FromAgent, FromDriver, Wrote
from executors.agents.local.supervisor import Ended, Event
from executors.api import JobSecret
from executors.job.output import SinkTable
from executors.job.server import STOP_SECONDS, Reception, ServerThread, listen

READ_BYTES = 1 << 16


class AgentConnection:
    """The connection of one agent. Any thread may use it."""

    def __init__(
        self, hello: AgentHello, loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter, sealer: Sealer
    ) -> None:
        self.hello = hello
        self._loop = loop
        self._writer = writer
        self._sealer = sealer

    def send(self, message: FromDriver) -> None:
        """Send ``message``, in the order of the calls, without waiting. If the agent is lost, it is dropped."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send, pickle.dumps(message))

    def close(self) -> None:
        """Close the connection, which ends the agent and its workers."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._writer.transport.abort)

    def _send(self, content: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._sealer.seal(content))


class Listener(Protocol):
    """Hears from agents, in the thread of the agent server."""

    def connected(self, link: AgentConnection) -> None:
        """An agent has connected."""

    def received(self, link: AgentConnection, message: FromAgent) -> None:
        """An agent sent ``message``."""

    def disconnected(self, link: AgentConnection, text: str) -> None:
        """The connection of an agent has ended: ``text`` says how."""


class WorkerReporter(Protocol):
    """Hears of the workers of agents."""

    def happened(self, event: Event) -> None:
        """``event`` happened to a worker of another host."""

    def not_started(self, number: int, text: str) -> None:
        """Worker ``number`` could not be started."""


def dispatch(message: FromAgent, sinks: SinkTable, gone: Callable[[int], object], reporter: WorkerReporter) -> None:
    """Give output to ``sinks``, and the rest to ``reporter``; ``gone`` hears before it which worker is no more."""
    if isinstance(message, Wrote):
        sinks.write(message.number, message.stream, message.data)
    elif isinstance(message, AgentFailed):
        gone(message.number)
        reporter.not_started(message.number, message.text)
    else:
        if isinstance(message, Ended):
            gone(message.rank)
        reporter.happened(message)


class AgentServer:
    """Listens on ``address`` for agents that know ``secret``: a context manager, which can be entered once.

    Owns the daemon thread "hvd-agents", which ends with the block, and closes the connections.
    """

    def __init__(self, address: str, secret: JobSecret, listener: Listener) -> None:
        self.address = address
        self.port = 0
        self._secret = secret
        self._listener = listener
        self._reception = Reception("the driver's port for agents", self._talk)
        self._thread = ServerThread("hvd-agents", self._reception.serve)

    def __enter__(self) -> AgentServer:
        listener = listen(self.address, "the agents of other hosts")
        self.port = listener.getsockname()[1]
        self._thread.start(listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Bound: that of the reception, which cancels the tasks of the connections.
        self._thread.stop(2 * STOP_SECONDS)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            link, opener = await self._introduce(reader, writer)
        except (OSError, EOFError, ValueError, TypeError) as error:
            self._reception.warn(
                "a connection to the driver came from a process that is not an agent of this job (%s)", error
            )
            return
        self._listener.connected(link)
        try:
            text = await self._listen_to(link, opener, reader)
        except Exception as error:  # noqa: BLE001  a message that cannot be read must not go unnoticed
            text = f"the connection to its agent broke ({error})"
        self._listener.disconnected(link, text)

    async def _introduce(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[AgentConnection, Opener]:
        end_in_silence(writer.get_extra_info("socket"), SILENCE_SECONDS)
        hello, opener, sealer = await frames.admit(reader, writer, self._secret.key)
        self._reception.authenticated(writer)
        return AgentConnection(AgentHello.decode(hello), asyncio.get_running_loop(), writer, sealer), opener

    async def _listen_to(self, link: AgentConnection, opener: Opener, reader: asyncio.StreamReader) -> str:
        while data := await reader.read(READ_BYTES):
            for content in opener.feed(data):
                self._listener.received(link, pickle.loads(content))
        return "its agent has ended"
