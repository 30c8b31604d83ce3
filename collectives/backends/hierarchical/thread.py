"""A second thread beside the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from collectives.backends.base import OnWait

WAIT_SECONDS = 0.05

Outcome: TypeAlias = "SimpleQueue[BaseException | None]"
"""Gets the error of a call, or None, when the call is over. Not a Future: an interrupt in a wait for one may leave its
lock taken, for ever."""


class StageThread:
    """Runs calls, one after another, on a thread of its own. The end of a ``with`` block waits for all of them.

    The first block starts the thread and :meth:`close` ends it: to start one for each operation takes half a
    millisecond. It keeps the affinity of the thread that ran that block. Not an executor of ``concurrent.futures``: an
    executor takes no calls once the interpreter has begun to shut down, when the engine still runs the operations in
    flight.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Outcome, Callable[[], None]] | None] = SimpleQueue()
        # Owned by this object, whose close() ends and joins it. An abort of the calls ends a wait for them.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_started = False

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
        self._has_started = True  # also if an interrupt ends the wait for the thread
        try:
            self._thread.start()
        except RuntimeError:  # the system has no thread for it
            self._has_started = False
            raise

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
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
