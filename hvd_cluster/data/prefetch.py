"""A thread that makes items before the consumer needs them."""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakSet

__all__ = ["Prefetch"]

CLOSE_SECONDS = 10.0

logger = logging.getLogger(__name__)

# Objects that are not garbage yet, for the end of the program.
_running: WeakSet[Prefetch] = WeakSet()


class Prefetch(Iterator[Any]):
    """The items of ``make()``: a thread makes them, and at most ``size`` of them wait here.

    An exception of ``make()`` is raised after the items before it. :meth:`close` must be called in the end.
    """

    def __init__(self, make: Callable[[], Iterable[Any]], size: int) -> None:
        self._make = make
        self._size = size
        self._items: deque[Any] = deque()
        self._error: BaseException | None = None
        self._done = False
        # Held for moments. Bound of a wait for a change of the above: none; the end of the thread and close() end it.
        self._changed = threading.Condition()
        # Ended and joined by close(), unless make() is in a call that does not return; a daemon for that case.
        self._thread = threading.Thread(target=self._run, name="hvd-data-loader", daemon=True)
        self._thread.start()
        _running.add(self)

    def __next__(self) -> Any:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._done)
            if self._items:
                self._changed.notify_all()
                return self._items.popleft()
            error, self._error = self._error or StopIteration(), None
        raise error

    def close(self) -> None:
        """Drop the items and end the thread after its current item. Any thread may call this, at any time."""
        with self._changed:
            self._items.clear()
            self._end()
        if self._thread is threading.current_thread():  # whose garbage collection found a loop that was given up
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning(
                "a data loader is busy for more than %g s with one batch; its thread is abandoned", CLOSE_SECONDS
            )

    def _run(self) -> None:
        try:
            for item in self._make():
                if not self._put(item):
                    break
        except BaseException as error:  # noqa: BLE001  it is the consumer's
            self._error = error
        finally:
            with self._changed:
                self._end()

    def _put(self, item: Any) -> bool:
        """Add an item when there is room; False if no more items are needed."""
        with self._changed:
            self._changed.wait_for(lambda: self._done or len(self._items) < self._size)
            if not self._done:
                self._items.append(item)
                self._changed.notify_all()
            return not self._done

    def _end(self) -> None:
        self._done = True
        self._changed.notify_all()


@atexit.register
def _close_all() -> None:
    """Runs before the interpreter ends, which would abort if a thread were still working on a tensor."""
    for prefetch in list(_running):
        if prefetch._thread.is_alive():  # not so in a forked child
            prefetch.close()
