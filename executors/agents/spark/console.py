"""The driver's end of the connections from the tasks: shows the output of workers, reports which tasks are lost."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Protocol

from collectives import Acceptor, Opener, Sealer, end_in_silence, frames, streams
from executors.agents.spark.connection import (
    ACCEPTED,
    FAILURE,
    GOODBYE,
    LONGEST_FRAME,
    MEETING,
    REFUSED,
    RESULT,
    RESULT_END,
    SILENCE_SECONDS,
    STREAMS,
    WARNING,
    TaskHello,
    TaskIdentity,
)
from executors.agents.spark.exchange import TextExchange
from executors.agents.spark.meeting import DECISION_SECONDS, SAY
from executors.api import JobSecret
from executors.job.output import Sink, Sinks
from executors.job.server import ServerThread, Started, listen, until_stopped

logger = logging.getLogger(__name__)


LARGEST_BACKLOG = 64 << 20
STOP_SECONDS = 10.0


class Display:
    """Feeds and closes sinks: a context manager, which can be entered once.

    The job never waits for a stream of the user. When LARGEST_BACKLOG bytes wait, further output is dropped, with one
    warning. After the first error of a stream all later output is dropped, with one warning. The daemon thread
    "hvd-output" ends with the block. It is abandoned when the stream takes nothing for STOP_SECONDS.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sink, bytes] | None] = deque()
        self._backlog = 0
        self._shown = 0
        self._dropping = False
        # Owners: the thread that calls show(), and the daemon, each for a moment.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hvd-output", daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        before = -1
        while self._thread.is_alive() and before != self._shown:
            before = self._shown
            self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the stream for the output of workers is blocked; the remaining output is dropped")

    def show(self, sink: Sink, data: bytes) -> None:
        """Feed ``sink`` with ``data``, or close it where that is empty; returns at once."""
        with self._changed:
            if self._backlog + len(data) <= LARGEST_BACKLOG:
                self._backlog += len(data)
                self._dropping = False
                self._put((sink, data))
                return
            first, self._dropping = not self._dropping, True
        if first:
            logger.warning("the stream for the output of workers is too slow; some of the output is dropped")

    def _put(self, entry: tuple[Sink, bytes] | None) -> None:
        with self._changed:
            self._waiting.append(entry)
            self._changed.notify()

    def _run(self) -> None:
        broken = False
        while (entry := self._take()) is not None:
            try:
                if not broken:
                    _feed(*entry)
            except Exception as error:  # noqa: BLE001  a stream of the user's may raise anything
                broken = True
                logger.warning("the output of workers cannot be written (%s) and is dropped from here on", error)
            with self._changed:
                self._backlog -= len(entry[1])
                self._shown += 1

    def _take(self) -> tuple[Sink, bytes] | None:
        with self._changed:
            # Bound: the life of the job; abort: None, at the end of the block.
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()


def _feed(sink: Sink, data: bytes) -> None:
    if data:
        sink.feed(data)
    else:
        sink.close()


# Spark kills the Python of a cancelled task after this time.
LATE_SECONDS = 4.0
NAMES = {kind: name for name, kind in STREAMS.items()}


class TaskListener(Protocol):
    """Hears from tasks, in the thread of the console. Outcomes are pickled, and come from a task of the job."""

    def connected(self, identity: TaskIdentity) -> None:
        """A task has its rank."""

    def lost(self, identity: TaskIdentity) -> None:
        """The connection to a task with a rank ended without a goodbye. Of tasks without, Spark may begin again."""

    def failed(self, outcome: bytes) -> None:
        """A rank failed; its task may run on."""

    def delivered(self, outcome: bytearray) -> None:
        """A task has this outcome at its end."""


class Console:
    """Listens on ``host`` for the tasks of a job: a context manager, which can be entered once.

    The tasks exchange texts here, if all of them connect within DECISION_SECONDS after the first one. The console calls
    the ``listener`` in its own thread, the daemon "hvd-console". Leaving the block ends the thread and closes the
    connections. If an exception leaves the block before all ``size`` tasks have connected, cancelled tasks that still
    connect are refused for LATE_SECONDS. Without an answer they would take the ended driver for one behind a firewall.
    """

    def __init__(
        self,
        host: str,
        size: int,
        secret: JobSecret,
        output: Sinks,
        listener: TaskListener,
    ) -> None:
        self.port = 0
        self._host = host
        self._size = size
        self._secret = secret
        self._output = output
        self._display = Display()
        self._listener = listener
        self._partitions: set[int] = set()
        self._ranks: set[int] = set()
        self._exchange: TextExchange[_TaskCall] = TextExchange(size)
        # Owner: the loop of this thread; bound: DECISION_SECONDS after the first task; abort: the end of the loop.
        self._decision: asyncio.TimerHandle | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[None] | None] = {}
        self._accepted: set[asyncio.StreamWriter] = set()  # connections to tasks of this job
        self._all_connected: asyncio.Event | None = None
        self._acceptor: Acceptor | None = None
        self._failing = False
        self._stopping = False
        self._thread = ServerThread("hvd-console", self._serve)

    def __enter__(self) -> Console:
        advice = "; set spark.driver.bindAddress to an address of this host"
        listener = listen(self._host, "its workers", advice)
        self.port = listener.getsockname()[1]
        with ExitStack() as begun:
            begun.enter_context(self._display)
            self._thread.start(listener)
            begun.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failing = kind is not None
        # Bound: LATE_SECONDS and STOP_SECONDS for the tasks, and as much for the remaining work.
        self._thread.stop(LATE_SECONDS + 2 * STOP_SECONDS)
        self._display.__exit__(kind, error, trace)

    async def _serve(self, listener: socket.socket, started: Started) -> None:
        self._all_connected = asyncio.Event()
        async with Acceptor(listener, streams(self._accept), "the driver's port for tasks") as self._acceptor:
            await until_stopped(started)
            self._stopping = True
            for writer in self._accepted:
                writer.write_eof()  # the task takes this as the end of the driver; later output is still shown
            if self._failing:
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._all_connected.wait(), LATE_SECONDS)
        if connections := list(filter(None, self._connections.values())):
            await asyncio.wait(connections, timeout=STOP_SECONDS)
        # Not cancelled: before Python 3.12, wait_for may swallow that.
        for writer in self._connections:
            writer.transport.abort()
        await asyncio.gather(*filter(None, self._connections.values()), return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections[writer] = asyncio.current_task()
        try:
            call = await self._admit(reader, writer)
            if call is not None:
                await self._receive(call, reader)
        except (OSError, EOFError, ValueError, TypeError) as error:
            if not self._stopping and self._acceptor is not None:
                self._acceptor.warn(
                    "a connection to the driver came from a process that is not a task of this job (%s)", error
                )
        finally:
            del self._connections[writer]
            self._accepted.discard(writer)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _TaskCall | None:
        sock = writer.get_extra_info("socket")
        end_in_silence(sock, SILENCE_SECONDS)
        # asyncio does not set it for accepted sockets, and the second message would wait 40 ms for the task's kernel.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = frames.nonce()
        writer.write(challenge)
        hello = TaskHello.unseal(self._secret, challenge, await frames.read_frame(reader))
        if self._acceptor is not None:
            self._acceptor.authenticated(writer.transport)
        call = _TaskCall(writer, challenge, hello.keys(self._secret, challenge), hello.partition)
        refused = self._stopping
        call.tell(REFUSED if refused else ACCEPTED)
        if not refused:
            self._accepted.add(writer)
        await writer.drain()
        self._partitions.add(hello.partition)
        if len(self._partitions) == self._size and self._all_connected is not None:
            self._all_connected.set()
        return None if refused else call

    def _join(self, call: _TaskCall) -> None:
        if self._decision is None:
            loop = asyncio.get_running_loop()
            self._decision = loop.call_later(DECISION_SECONDS, lambda: self._tell(self._exchange.expire()))
        self._tell(self._exchange.join(call, call.partition))

    def _tell(self, messages: Mapping[_TaskCall, bytes]) -> None:
        if not self._stopping:  # afterwards the tasks are told of the end only
            for call, content in messages.items():
                call.tell(content)

    async def _receive(self, call: _TaskCall, reader: asyncio.StreamReader) -> None:
        try:
            self._join(call)
            while (message := await frames.read_frame(reader, LONGEST_FRAME)) != GOODBYE:
                if message[:1] == MEETING:
                    self._meet(call, message[1:])
                elif call.rank_output is not None:
                    self._take(call, message)
        except (OSError, EOFError) as error:
            self._note_loss(call, error)
        finally:
            self._tell(self._exchange.leave(call))
            if call.rank_output is not None:
                call.rank_output.close()

    def _meet(self, call: _TaskCall, message: bytes) -> None:
        for content in call.opener.feed(message):
            if content[:1] == SAY:
                self._tell(self._exchange.say(call, content[1:].decode()))
            else:
                self._identify(call, TaskIdentity.decode(content[1:]))

    def _identify(self, call: _TaskCall, identity: TaskIdentity) -> None:
        if identity.rank in self._ranks:
            self._tell({call: REFUSED})
            return
        self._ranks.add(identity.rank)
        call.rank_output = _RankOutput(self._display, self._output, identity.rank)
        call.identity = identity
        self._listener.connected(identity)
        self._tell({call: ACCEPTED})

    def _take(self, call: _TaskCall, message: bytes) -> None:
        kind = message[:1]
        if kind == FAILURE:
            self._listener.failed(frames.unseal(self._secret.key, call.challenge, message[1:]))
        elif kind == RESULT:
            call.result += memoryview(message)[1:]
        elif kind == RESULT_END and not self._stopping:
            frames.check_digest(message[1:], self._secret.key, call.challenge, call.result)
            self._listener.delivered(call.result)
            call.writer.write(ACCEPTED)
        elif kind == WARNING:
            logger.warning("%s", message[1:].decode(errors="replace"))
        elif call.rank_output is not None:
            call.rank_output.feed(message)

    def _note_loss(self, call: _TaskCall, error: Exception) -> None:
        if self._stopping:
            return
        if call.identity is not None:
            self._listener.lost(call.identity)
        else:
            level = logging.DEBUG if isinstance(error, EOFError | ConnectionError) else logging.WARNING
            logger.log(level, "the connection to a task ended before the task had a rank (%s)", error)


class _TaskCall:
    """The driver's end of the connection to one task: its messages, and what is known of it."""

    def __init__(
        self, writer: asyncio.StreamWriter, challenge: bytes, keys: tuple[bytes, bytes], partition: int
    ) -> None:
        self.writer = writer
        self.partition = partition
        self.challenge = challenge
        self.opener, self._sealer = Opener(keys[0]), Sealer(keys[1])
        self.identity: TaskIdentity | None = None
        self.rank_output: _RankOutput | None = None
        self.result = bytearray()

    def tell(self, content: bytes) -> None:
        """Send a message of the meeting."""
        self.writer.write(self._sealer.seal(content))


class _RankOutput:
    """The output of one rank."""

    def __init__(self, display: Display, output: Sinks, rank: int) -> None:
        self._display = display
        self._sinks = {kind: output.sink(rank, name) for kind, name in NAMES.items()}

    def feed(self, message: bytes) -> None:
        sink, data = self._sinks.get(message[:1]), message[1:]
        if sink is not None and data:
            self._display.show(sink, data)

    def close(self) -> None:
        for sink in self._sinks.values():
            self._display.show(sink, b"")
