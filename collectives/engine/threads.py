"""The shared state of the threads of an engine: requests to the driving thread, its wakes, and callers that wait."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from enum import IntEnum, auto
from typing import Any

from collectives.net.channel import Channel, SignalEvent


class CommandKind(IntEnum):  # a plain Enum is hashed in Python
    """A kind of request to the thread that drives; each has an argument."""

    SUBMIT = auto()
    """These works begin to be negotiated."""
    URGE = auto()
    """A caller waits for the work of this key."""
    SETTLE = auto()
    """An operation of a device may be over. No argument."""
    ANSWER = auto()
    """This rank has found out where it stands. No argument."""
    CALL = auto()
    """Call this function."""


class CommandQueue:
    """Requests of other threads to the thread that drives, which carries them out in order, and the wakes of threads.

    All methods are for any thread. ``commands`` are the requests; ``polling`` the threads that sleep in ``channel``.
    ``unpark`` wakes the communication thread where it does not sleep there.
    """

    def __init__(self, channel: Channel) -> None:
        self.commands: deque[tuple[CommandKind, Any]] = deque()
        self.polling: set[int] = set()
        # Owned by the communication thread, which parks here, for milliseconds, while a caller drives.
        self.unpark = SignalEvent()
        self._channel = channel

    def put(self, command: CommandKind, argument: Any = None) -> None:
        """Carry out ``command`` with the next step. Wakes no thread."""
        self.commands.append((command, argument))

    def call(self, function: Callable[[], object]) -> None:
        """Call ``function`` with the next step. Wakes no thread."""
        self.commands.append((CommandKind.CALL, function))

    def notify(self) -> None:
        """There is work: wake the thread that drives, or the communication thread."""
        if self.polling:
            self._channel.wake()
        self.unpark.set()

    def answer(self) -> None:
        """This rank has found out where it stands: the thread that drives sends the answer soon."""
        self.put(CommandKind.ANSWER)
        self.notify()


class Waiters:
    """The callers that sleep until a work is done, or until no thread drives."""

    def __init__(self) -> None:
        # Owned by this object; waits are sliced.
        self.changed = threading.Condition(threading.RLock())
        self.threads: set[int] = set()

    def announce(self) -> None:
        """A work is done, or no thread drives: wake all."""
        if self.threads:
            with self.changed:
                self.changed.notify_all()

    def wait(self, seconds: float, is_needed: Callable[[], bool]) -> None:
        """Sleep until :meth:`announce`, at most so many ``seconds``, if it ``is_needed`` still."""
        me = threading.get_ident()
        with self.changed:
            try:
                self.threads.add(me)
                if is_needed():
                    self.changed.wait(seconds)
            finally:
                self.threads.discard(me)

    def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Sleep until ``condition`` holds, at most so many ``seconds``; return whether it does."""
        me = threading.get_ident()
        with self.changed:
            self.threads.add(me)
            try:
                return self.changed.wait_for(condition, seconds)
            finally:
                self.threads.discard(me)


class Callers:
    """The threads that are inside calls of the engine: a signal handler there must not wait for other threads.

    ``hold``, once set, is called at the end of each call: it blocks daemon threads while the process ends.
    """

    def __init__(self) -> None:
        self.hold: Callable[[], None] | None = None
        self._threads: dict[int, bool] = {}

    def __enter__(self) -> None:
        self._threads[threading.get_ident()] = True

    def __exit__(self, *_: object) -> None:
        self._threads[threading.get_ident()] = False
        if self.hold is not None:
            self.hold()

    def __contains__(self, thread: int) -> bool:
        return self._threads.get(thread, False)

    def ever(self) -> dict[int, bool]:
        """The threads that have made calls, and whether each is inside of one."""
        return dict(self._threads)


class DrivingThread:
    """The one thread that drives the engine: it holds the ``lock``.

    ``caller`` is a caller that drives, 0 for none; ``communication`` is the communication thread.
    """

    def __init__(self) -> None:
        # Owned by the driving thread; no thread blocks on it without a bound: callers sleep in Waiters instead.
        self.lock = threading.Lock()
        self.caller = 0
        self.communication: int | None = None

    def is_here(self) -> bool:
        """Whether the calling thread, which runs a part of the engine, is the one that drives."""
        return threading.get_ident() == (self.caller or self.communication)
