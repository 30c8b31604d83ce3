"""A thread beside the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

__all__ = ["Beside"]


class Beside:
    """Runs calls, one after another, on a thread of its own while a ``with`` block lasts; its end waits for all calls.

    Not an executor of ``concurrent.futures``: these take no calls once the interpreter has begun to shut down, which is
    when the engine runs what is still in flight.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        # Owned by the with block, which ends and joins it. What aborts the calls ends a wait for them.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Beside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.put(None)
        self._thread.join()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Run ``call`` after those that were submitted before; its result tells when it is over, or raises."""
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

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
