"""A second thread beside the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue

from collectives.backends.base import OnWait

__all__ = ["Beside"]

WAIT_SECONDS = 0.05


class Beside:
    """Runs calls, one after another, on a thread of its own. The end of a ``with`` block waits for all of them.

    The first block starts the thread and :meth:`close` ends it: to start one for each operation takes half a
    millisecond. Not an executor of ``concurrent.futures``: an executor takes no calls once the interpreter has begun to
    shut down, when the engine still runs the operations in flight.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._last: Future[None] | None = None
        # Owned by this object, whose close() ends and joins it. An abort of the calls ends a wait for them.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_started = False

    def __enter__(self) -> Beside:
        if not self._has_started:
            self._has_started = True
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._last is not None:
            wait((self._last,))
            self._last = None

    def close(self) -> None:
        """End the thread, outside of a block. Idempotent."""
        if self._has_started and self._thread.is_alive():
            self._calls.put(None)
            self._thread.join()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run ``call`` after those that were submitted before; its result is done when the call is over, or raises."""
        future = self._last = Future()
        self._calls.put((future, call))
        return future

    def finish(self, call: Future[None], on_wait: OnWait) -> None:
        """Wait until ``call`` is over, and raise its error; ``on_wait`` is called while it takes long."""
        while not wait((call,), WAIT_SECONDS).done:
            on_wait()
        call.result()

    def _run(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            try:
                call()
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, call, entry  # which would keep the memory of the caller until the next call
