"""Attempts to connect: how long one may take, how another thread ends it, and when to repeat it."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 1.0
_jitter = random.Random()  # not that of the module: a script that has seeded it expects the same numbers in each run


def attempts(seconds: float, wait: Callable[[float], object] = time.sleep) -> Iterator[float]:
    """One item for each attempt that may begin within ``seconds``, at least one: the remaining seconds.

    Between attempts, ``wait`` is called with the seconds of a pause, each twice as long as the one before, up to
    LONGEST_PAUSE, and shortened at random by up to a half.
    """
    deadline, pause = time.monotonic() + seconds, FIRST_PAUSE
    yield seconds
    while time.monotonic() + pause < deadline:
        wait(pause * _jitter.uniform(0.5, 1.0))
        pause = min(2 * pause, LONGEST_PAUSE)
        yield max(0.0, deadline - time.monotonic())


SLICE_SECONDS = 0.02


class ConnectAttempt:
    """A deadline, ``seconds`` from now, and an :meth:`abort` for other threads. A context manager.

    ``deadline`` is in monotonic seconds. ``check``, if given, is called every few milliseconds while this attempt
    waits, and may raise to end it.
    """

    def __init__(self, seconds: float, check: Callable[[], None] | None = None) -> None:
        self.deadline = time.monotonic() + seconds
        self._check = check
        self._error: Exception | None = None
        self._calls: list[Callable[[], object]] = []
        # Owned by this attempt, held for a few instructions.
        self._lock = threading.RLock()
        self._wake: int | None = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __enter__(self) -> ConnectAttempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def abort(self, error: Exception) -> None:
        """Make every present and future wait raise ``error``; from any thread. Does nothing after :meth:`close`."""
        with self._lock:
            if self._wake is None or self._error is not None:
                return
            self._error = error
            os.eventfd_write(self._wake, 1)
            calls = list(self._calls)
        for call in calls:
            call()

    def check(self) -> None:
        """Raise the error of :meth:`abort`, if there was one."""
        if self._error is not None:
            raise self._error
        if self._check is not None:
            self._check()

    def wait(self, events: Mapping[int, int], seconds: float | None = None) -> list[int]:
        """The descriptors that are ready for ``events``, by descriptor as for poll(2); empty after the time.

        The time is ``seconds``, and ends with the deadline at the latest. Raises the error of :meth:`abort`.
        """
        limit = self.deadline if seconds is None else min(self.deadline, time.monotonic() + seconds)
        poller = select.poll()
        for descriptor, mask in events.items():
            poller.register(descriptor, mask)
        return self.poll(poller, limit)

    def poll(self, poller: select.poll, limit: float) -> list[int]:
        """Like :meth:`wait`, for a ``poller`` and until ``limit``, in monotonic seconds."""
        if self._wake is not None:
            poller.register(self._wake, select.POLLIN)
        while True:
            self.check()
            left = max(0.0, min(limit, self.deadline) - time.monotonic())
            ready = poller.poll((left if self._check is None else min(left, SLICE_SECONDS)) * 1000.0)
            self.check()
            if ready or not left:
                return [descriptor for descriptor, _ in ready]

    @contextmanager
    def checking(self, check: Callable[[], None]) -> Iterator[None]:
        """While the block runs, this attempt calls ``check`` as often as the check that it was made with."""
        before = self._check

        def check_both() -> None:
            if before is not None:
                before()
            check()

        self._check = check_both
        try:
            yield
        finally:
            self._check = before

    @contextmanager
    def interrupts(self, call: Callable[[], object]) -> Iterator[None]:
        """While the block runs, :meth:`abort` also calls ``call``, to end another kind of wait in the block.

        The error of :meth:`abort` then replaces any error of the block.
        """
        with self._lock:
            self._calls.append(call)
        try:
            self.check()
            yield
        except Exception as error:
            if self._error is not None and error is not self._error:
                raise self._error from error
            raise
        finally:
            with self._lock:
                self._calls.remove(call)

    def close(self) -> None:
        """Release the descriptor. Idempotent."""
        with self._lock:
            wake, self._wake = self._wake, None
        if wake is not None:
            os.close(wake)
