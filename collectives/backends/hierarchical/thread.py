"""A second thread beside the caller's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from collectives.backends.base import OnWait

WAIT_SECONDS = 0.05
START_SECONDS = 1.0

Outcome: TypeAlias = "SimpleQueue[BaseException | None]"
"""Gets the error of a call, or None, when the call is over. Not a Future: an interrupt in a wait for one may leave its
lock taken, for ever."""

Calls: TypeAlias = "SimpleQueue[tuple[Outcome, Callable[[], None]] | None]"


class StageThread:
    """Runs calls, one after another, on a thread of its own. The end of a ``with`` block waits for all of them.

    The first block starts the thread and :meth:`close` ends it: to start one for each operation takes half a
    millisecond. It keeps the affinity of the thread that ran that block. Not an executor of ``concurrent.futures``: an
    executor takes no calls once the interpreter has begun to shut down, when the engine still runs the operations in
    flight.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_started = self._was_starting = False
        self._renew()

    def _renew(self) -> None:
        self._calls: Calls = SimpleQueue()
        # Owned by this object, whose close() ends and joins it. An abort of the calls ends a wait for them.
        self._thread = threading.Thread(target=_run, args=(self._calls,), name=self._name, daemon=True)

    def __enter__(self) -> StageThread:
        if not self._has_started:
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.submit(_nothing).get()  # which is the last call of the block

    def close(self) -> None:
        """End the thread, outside of a block. Idempotent."""
        self._calls.put(None)  # also where an interrupt hid that the thread has started
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, call: Callable[[], None]) -> Outcome:
        """Run ``call`` after those that were submitted before."""
        outcome: Outcome = SimpleQueue()
        self._calls.put((outcome, call))
        return outcome

    def finish(self, outcome: Outcome, on_wait: OnWait) -> None:
        """Wait until the call with this outcome is over, and raise its error; ``on_wait`` is called in a long wait."""
        while True:
            try:
                error = outcome.get(timeout=WAIT_SECONDS)
                break
            except Empty:
                on_wait()
        if error is not None:
            raise error

    def _start(self) -> None:
        if self._was_starting and not self._is_there():
            self._calls.put(None)
            self._renew()
            self._was_starting = False
        if not self._was_starting:
            self._was_starting = True
            self._thread.start()
        self._has_started = True

    def _is_there(self) -> bool:
        """Whether the thread exists though an interrupt has ended its start; it says so within START_SECONDS."""
        deadline = time.monotonic() + START_SECONDS
        while self._thread.ident is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._thread.ident is not None


def _run(calls: Calls) -> None:
    while (entry := calls.get()) is not None:
        outcome, call = entry
        error: BaseException | None = None
        try:
            call()
        except BaseException as raised:  # noqa: BLE001
            error = raised
        del call, entry  # which would keep the memory of the caller until the next call
        outcome.put(error)
        del outcome, error


def _nothing() -> None:
    return
