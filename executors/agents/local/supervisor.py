"""Starts the worker processes of this host, tells their events, ends all of them; and the end of one, in words.

The events go to the program of a job, :mod:`executors.agents.local.job`, or from an agent to its driver.
"""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from collectives import Frames
from executors.agents.local.processes import WorkerProcess, unheeded
from executors.api import WorkerError
from executors.failures import COLOUR, CONSEQUENCES, Failure, FailureKind
from executors.job.arguments import resolve_seconds
from executors.job.output import Lines, Sink, Sinks, TeeSink

GRACE_SECONDS = 5.0
# The time of a guard, or of an agent, beyond the grace: to kill the remaining processes and to see them end.
GUARD_SECONDS = 10.0
CHUNK = 1 << 16
# Linux allows an ordinary user pipes of up to one mebibyte.
CHUNKS_IN_A_PIPE = 16


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """The process of ``rank`` is up, as process ``pid``."""

    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """The worker of ``rank`` sent ``message``."""

    rank: int
    message: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """The process of ``rank`` ended; ``code`` is negative for a signal. Its output and its messages came before.

    ``last_lines`` are those of its standard error.
    """

    rank: int
    code: int
    last_lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Unheard:
    """The worker of ``rank`` has no handler for the signal ``number``, which would have ended it: it did not get it."""

    rank: int
    number: int


Event = WorkerStarted | MessageReceived | Ended | Unheard
REPORTS: Mapping[str, type[WorkerStarted | Unheard]] = {"started": WorkerStarted, "unheard": Unheard}


def resolve_grace(seconds: float | None = None) -> float:
    """``seconds``, or else HOROVOD_GRACE_SECONDS, or else 5. Raises ValueError unless it is a positive number."""
    return resolve_seconds(seconds, "grace_seconds", "HOROVOD_GRACE_SECONDS", GRACE_SECONDS)


def longest_end(grace: float) -> float:
    """The seconds after which workers that were asked to end have ended, or the one that watches them is stuck."""
    return 2 * grace + GUARD_SECONDS


def ending_signal(error: BaseException | None) -> int:
    """The signal for the workers of a block that ``error`` leaves."""
    return signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM


class Supervisor:
    """Starts workers, reports events, and leaves no process behind at the end of the ``with`` block.

    The loop runs in the thread of the caller; there is no other thread. Other threads may call :meth:`soon`. Leaving
    the block early, by KeyboardInterrupt or SystemExit, asks all workers to end, by SIGINT or SIGTERM, and kills the
    remaining ones after ``grace`` seconds; another exception, or a KeyboardInterrupt in that time, kills at once.
    """

    def __init__(self, grace: float = GRACE_SECONDS) -> None:
        self._grace = grace
        self._members: dict[int, _Member] = {}
        self._selector = selectors.DefaultSelector()
        self._events: deque[Event] = deque()
        self._alarms: list[_Alarm] = []
        self._serial = itertools.count()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
                self.hurry()
            self.leave(ending_signal(error))
        except BaseException:
            self.hurry()
            self.leave()
            raise
        finally:
            self._is_closed = True
            self._selector.close()
            os.close(self._wake)

    def launch(
        self,
        rank: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        output: Sinks,
        messages: int | None = None,
        descriptors: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        in_background: bool = False,
    ) -> None:
        """Start the worker of ``rank``, which inherits ``descriptors`` and reads ``stdin``.

        ``messages`` is the reading end of a pipe of :class:`Frames`; the supervisor takes ownership of it. A process
        ``in_background`` is no worker: :meth:`end` asks it to end only when the workers have had the time of grace.
        Raises OSError if a process or a file of ``output`` cannot be made.
        """
        try:
            sinks = [output.sink(rank, name) for name in ("stdout", "stderr")]
            process = WorkerProcess(command, environment, self._grace, descriptors, stdin)
        except BaseException:
            if messages is not None:
                os.close(messages)
            raise
        tail = Tail()
        outputs = [Pipe(process.stdout, sinks[0]), Pipe(process.stderr, TeeSink(sinks[1], tail))]
        if messages is not None:
            outputs.append(Pipe(messages, _Frames(rank, self._events)))
        reports = Pipe(process.report, _Reports(lambda line: self._report(member, line)))
        member = self._members[rank] = _Member(rank, process, outputs, reports, tail, in_background)
        for channel in (*outputs, reports):
            self._selector.register(channel.fd, selectors.EVENT_READ, channel)

    def events(self, is_over: Callable[[], bool] = lambda: True) -> Iterator[Event]:
        """The events, until every worker has ended and the job ``is_over``. Raises OSError if the output cannot be
        written.
        """
        while self._events or not is_over() or self._members:
            while self._events:
                yield self._events.popleft()
            if not is_over() or self._members:
                self._step()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call ``action`` between two events, ``seconds`` from now, unless every worker ended before."""
        heapq.heappush(self._alarms, _Alarm(time.monotonic() + seconds, next(self._serial), action))

    def soon(self, action: Callable[[], None]) -> None:
        """Call ``action`` between two events; from any thread, before the end of the ``with`` block.

        From a handler of signals also after that, when it does nothing.
        """
        self._calls.append(action)
        if not self._is_closed:
            os.eventfd_write(self._wake, 1)

    def listen(self, descriptor: int, action: Callable[[], None]) -> None:
        """Call ``action`` once, between two events, when ``descriptor`` is readable or its other end is closed.

        The caller owns the descriptor and keeps it open until the end of the ``with`` block.
        """
        self._selector.register(descriptor, selectors.EVENT_READ, _Wake(descriptor, action))

    def attach(self, channel: Pipe) -> None:
        """Read ``channel`` until its end, and close it then. It does not keep the supervisor from ending."""
        self._selector.register(channel.fd, selectors.EVENT_READ, channel)

    def stop(self, rank: int) -> None:
        """Ask the worker of ``rank`` to end; it is killed after the time of grace. Does nothing if it has ended."""
        if rank in self._members:
            self._members[rank].process.terminate()

    def kill(self, rank: int) -> None:
        """Kill the worker of ``rank``. Does nothing if it has ended."""
        if rank in self._members:
            self._members[rank].process.hurry()

    def pass_on(self, number: int) -> bool:
        """Send all workers ``number``, see :meth:`WorkerProcess.pass_on`; whether there is one."""
        workers = [member for member in self._members.values() if not member.in_background]
        for member in workers:
            member.process.pass_on(number)
        return bool(workers)

    def end(self, spare: int | None = None, number: int = signal.SIGTERM) -> None:
        """Ask all workers to end by ``number``, SIGTERM or SIGINT, and kill the rest after the time of grace.

        Rank ``spare`` is asked only then.
        """
        self._terminate(lambda member: member.rank != spare and not member.in_background, number)
        self.after(self._grace, self._terminate)
        self.after(longest_end(self._grace), self._kill)

    def hurry(self) -> None:
        """Kill all workers now, and drop their output: the console itself may have failed."""
        self._mute()
        for member in self._members.values():
            member.process.hurry()

    def leave(self, number: int = signal.SIGTERM, is_over: Callable[[], bool] = lambda: True) -> None:
        """Ask all workers to end, see :meth:`end`, and return when they have, and the job ``is_over``.

        A launcher may be asked by SIGTERM more than once, such as by each part of a batch system: the time is the same.
        """
        if not self._members and is_over():
            return
        self.end(number=number)
        is_waiting = True
        while is_waiting:  # Bound: that of end(); abort: KeyboardInterrupt.
            with suppress(SystemExit), unheeded(signal.SIGTERM):
                for _ in self.events(is_over):
                    pass
                is_waiting = False

    def _step(self) -> None:
        # Bound: the next alarm, or else the end of the job; abort: an exception out of a signal handler.
        for key, _ in self._selector.select(self._patience()):
            if key.fd == self._wake:
                self._answer()
            elif isinstance(key.data, _Wake):
                self._selector.unregister(key.data.descriptor)
                key.data.action()
            else:
                self._read(key.data)
        for member in [member for member in self._members.values() if member.reports.ended]:
            self._gone(member)
        while self._alarms and self._alarms[0].at <= time.monotonic():
            heapq.heappop(self._alarms).action()

    def _answer(self) -> None:
        os.eventfd_read(self._wake)
        for _ in range(len(self._calls)):  # a call that comes meanwhile wakes the loop again
            self._calls.popleft()()

    def _patience(self) -> float | None:
        if any(member.reports.ended for member in self._members.values()):
            return 0.0
        return max(0.0, self._alarms[0].at - time.monotonic()) if self._alarms else None

    def _read(self, channel: Pipe) -> None:
        channel.read()
        if channel.ended:
            self._close(channel)

    def _close(self, channel: Pipe) -> None:
        if not channel.closed:
            self._selector.unregister(channel.fd)
            channel.close()

    def _report(self, member: _Member, line: str) -> None:
        kind, _, number = line.partition(" ")
        if kind == "ended":
            self._end_of(member, int(number))
        else:
            self._events.append(REPORTS[kind](member.rank, int(number)))

    def _end_of(self, member: _Member, code: int) -> None:
        member.ended = True
        for channel in member.outputs:
            channel.drain()
        self._events.append(Ended(member.rank, code, member.tail.text()))

    def _gone(self, member: _Member) -> None:
        code = member.process.reap()
        if not member.ended:
            self._end_of(member, code or 1)
        for channel in member.outputs:
            channel.drain()
            self._close(channel)
        self._close(member.reports)
        del self._members[member.rank]

    def _terminate(
        self, is_meant: Callable[[_Member], bool] = lambda member: True, number: int = signal.SIGTERM
    ) -> None:
        for member in filter(is_meant, self._members.values()):
            member.process.terminate(number)

    def _kill(self) -> None:
        for member in self._members.values():
            member.process.kill()

    def _mute(self) -> None:
        for member in self._members.values():
            for channel in member.outputs:
                channel.mute()


class Pipe:
    """The reading end of a pipe, and the sink for its data. Never blocks."""

    def __init__(self, fd: int, sink: Sink) -> None:
        self.fd = fd
        self.ended = False
        self.closed = False
        self._sink: Sink | None = sink
        os.set_blocking(fd, False)

    def read(self) -> bool:
        """Hand one chunk to the sink. False if there is no chunk now, or if the pipe has :attr:`ended`."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # of a connection: it broke
            data = b""
        self.ended = not data
        if data and self._sink:
            self._sink.feed(data)
        return not self.ended

    def drain(self) -> None:
        """Hand the content of the pipe to the sink, but no more than a pipe can hold: a writer may still add to it."""
        for _ in range(CHUNKS_IN_A_PIPE):
            if self.closed or not self.read():
                break

    def mute(self) -> None:
        """From now on, drop the data that is read."""
        self._sink = None

    def close(self) -> None:
        """Close the pipe, then the sink. Closing twice does nothing."""
        if self.closed:
            return
        self.closed = True
        os.close(self.fd)
        if self._sink:
            self._sink.close()


KEPT_LINES = 200
LONGEST_SHOWN = 1000


class Tail:
    """Keeps the last lines of a stream, each without its end and cut after a thousand bytes."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._kept: deque[bytes] = deque(maxlen=KEPT_LINES)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self._kept.extend(line[:LONGEST_SHOWN] for line in self._lines.feed(data))

    def close(self) -> None:
        """The stream has ended; its last line may lack an end."""
        self._kept.extend(line[:LONGEST_SHOWN] for line in self._lines.flush())

    def text(self) -> tuple[str, ...]:
        """The lines so far, and the last one, which may lack an end."""
        rest = self._lines.rest[:LONGEST_SHOWN]
        lines = [*self._kept, rest][-KEPT_LINES:] if rest else self._kept
        return tuple(line.decode("utf-8", "replace").rstrip() for line in lines)


@dataclass(slots=True)
class _Member:
    rank: int
    process: WorkerProcess
    outputs: list[Pipe]
    reports: Pipe
    tail: Tail
    in_background: bool
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Wake:
    descriptor: int
    action: Callable[[], None]


@dataclass(frozen=True, slots=True, order=True)
class _Alarm:
    at: float
    serial: int
    action: Callable[[], None] = field(compare=False)


class _Reports:
    """Takes the lines of a guard."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._report(line.decode("ascii"))

    def close(self) -> None:
        """Drop the rest, which is no line."""


class _Frames:
    """Takes the messages of a worker. A message that was cut short by its death is dropped."""

    def __init__(self, rank: int, events: deque[Event]) -> None:
        self._rank = rank
        self._events = events
        self._frames = Frames()

    def feed(self, data: bytes) -> None:
        self._events.extend(MessageReceived(self._rank, message) for message in self._frames.feed(data))

    def close(self) -> None:
        """Drop the rest, which is no message."""


TRACEBACK = "Traceback (most recent call last):"
# A shell reports a command that signal n ended as 128 + n; 64 is the largest signal.
SIGNALLED = range(129, 129 + 64)
# A worker whose function returned may take this long to end: handlers of atexit, threads that are no daemons.
TEARDOWN_SECONDS = 60.0


def ended(event: Ended, what: str = "") -> Failure:
    """The failure of a worker whose process ended; ``what`` is the work that it left undone."""
    kind = kind_of_end(event.code, event.last_lines)
    return Failure(kind, f"{_how(event.code)}{what}", event.code, event.last_lines)


def kind_of_end(exit_code: int, last_lines: Sequence[str]) -> FailureKind:
    """The kind of a process that ended with ``exit_code``, negative for a signal, after these lines of its stderr.

    A traceback with an error of this package anywhere in its chain, printed as ``module.Class: text``, is a
    consequence.
    """
    if exit_code < 0 or exit_code in SIGNALLED:
        return FailureKind.SIGNAL
    lines = [COLOUR.sub("", line) for line in last_lines]
    if TRACEBACK not in lines:
        return FailureKind.EXIT
    names = {line.partition(":")[0] for line in lines}
    kinds = [kind for error, kind in CONSEQUENCES.items() if f"{error.__module__}.{error.__qualname__}" in names]
    return min(kinds, default=FailureKind.EXCEPTION)


def died(event: Ended, what: str, host: str, name: str = "") -> WorkerError:
    """The error for a worker that ended unexpectedly; ``what`` is the work that it left undone.

    ``name`` is the readable name of ``host``, if ``host`` is no such name.
    """
    text = f"rank {event.rank} on {name or host} {_how(event.code)}{what}"
    return WorkerError(text, event.rank, host, event.code)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    hint = "; the host may have run out of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code} ({name}{hint})"
