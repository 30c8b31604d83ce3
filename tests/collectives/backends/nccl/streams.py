"""Streams that run as late as they may: a call runs only when somebody waits for its end, or asks for it.

So an operation that begins before the memory is ready, or a result that is read before it is there, shows every time.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable

from collectives.api import HorovodInternalError
from collectives.backends.completion import Completion

__all__ = ["PATIENCE", "LateStream", "Moment"]

PATIENCE = 20.0
_streams: dict[int, LateStream] = {}
_handles = itertools.count(0x5000, 0x10)


class LateStream:
    """Runs calls in their order, on a thread, up to the last one that was demanded. ``handle`` is its name."""

    def __init__(self) -> None:
        self.handle = next(_handles)
        _streams[self.handle] = self
        # Owned by this stream; every wait for it is bounded by PATIENCE.
        self._changed = threading.Condition()
        self._calls: deque[tuple[Callable[[], object], Moment]] = deque()
        self._enqueued = self._wanted = self._done = 0
        self._is_open = True
        self._is_held = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hvd-test-stream", daemon=True)
        self._thread.start()

    def enqueue(self, call: Callable[[], object]) -> Moment:
        with self._changed:
            assert self._is_open, "a call on a stream that was closed"
            self._enqueued += 1
            moment = Moment(self, self._enqueued)
            self._calls.append((call, moment))
        return moment

    def demand(self, number: int) -> None:
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()

    def hold(self) -> None:
        """Run nothing, also if it is demanded, until :meth:`release`."""
        self._is_held = True

    def release(self) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()

    def catch_up(self) -> None:
        """Run everything."""
        self.demand(self._enqueued)

    def await_number(self, number: int, timeout: float) -> bool:
        self.demand(number)
        with self._changed:
            return self._changed.wait_for(lambda: self._done >= number, timeout)

    def is_past(self, number: int) -> bool:
        return self._done >= number

    def close(self) -> None:
        with self._changed:
            self._is_open = False
            self._wanted = self._enqueued
            self._changed.notify_all()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        _streams.pop(self.handle, None)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            call, moment = item
            moment.run(call)
            if not isinstance(moment.error, HorovodInternalError):
                self.error = self.error or moment.error
            with self._changed:
                self._done += 1
                self._changed.notify_all()

    def _next(self) -> tuple[Callable[[], object], Moment] | None:
        with self._changed:
            while self._is_held or (self._done >= self._wanted and (self._is_open or self._done < self._enqueued)):
                self._changed.wait(PATIENCE)
            return self._calls.popleft() if self._calls else None


class Moment(Completion):
    """The end of a call: an event."""

    def __init__(self, stream: LateStream, number: int) -> None:
        self._stream = stream
        self._number = number
        self.value: object = None
        self.error: BaseException | None = None

    def run(self, call: Callable[[], object]) -> None:
        try:
            self.value = call()
        except BaseException as error:  # noqa: BLE001
            self.error = error

    @property
    def is_done(self) -> bool:
        """Asking is not waiting, but who asks again and again must see an end."""
        over = self._stream.is_past(self._number)
        self._stream.demand(self._number)
        return over and self._succeeded()

    def wait(self, timeout: float) -> bool:
        return self._stream.await_number(self._number, timeout) and self._succeeded()

    def precede(self, stream: int) -> None:
        _streams[stream].enqueue(lambda: self.wait(PATIENCE))

    def outcome(self) -> object:
        """The value of the call."""
        assert self.wait(PATIENCE)
        return self.value

    def _succeeded(self) -> bool:
        """An error stays with the stream, as on a GPU; that of a collective that was aborted does not count."""
        if self._stream.error is not None:
            raise AssertionError("a kernel failed") from self._stream.error
        return True
