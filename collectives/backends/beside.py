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
    """Runs calls, one after another, on its own thread during a ``with`` block, whose end waits for all calls.

    Not an executor of ``concurrent.futures``: an executor takes no calls once the interpreter has begun to shut down,
    when the engine still runs the operations in flight.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        # Owned by the with block, which ends and joins it. An abort of the calls ends a wait for them.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)
        self._thread.join()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run ``call`` after those that were submitted before; its result is done when the call is over, or raises."""
        future: Future[None] = Future()
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
