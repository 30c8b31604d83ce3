"""Shows the output of workers in a thread of its own, so that a slow stream of the user blocks nothing."""

from __future__ import annotations

import logging
import threading
from collections import deque
from types import TracebackType

from executors.local.output import Sink

__all__ = ["Display"]

LARGEST_BACKLOG = 64 << 20
STOP_SECONDS = 10.0

logger = logging.getLogger(__name__)


class Display:
    """Feeds and closes sinks: a context manager, which can be entered once.

    The job never waits for a stream of the user. When LARGEST_BACKLOG bytes wait, further output is dropped, with one
    warning. After the first error of a stream all later output is dropped, with one warning. The daemon thread
    "hvd-output" ends with the block. It is abandoned when the stream takes nothing for STOP_SECONDS.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sink, bytes] | None] = deque()
        self._backlog = 0
        self._shown = 0
        self._dropping = False
        # Owners: the thread that calls show(), and the daemon, each for a moment.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="hvd-output", daemon=True)

    def __enter__(self) -> Display:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put(None)
        before = -1
        while self._thread.is_alive() and before != self._shown:
            before = self._shown
            self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            logger.warning("the stream for the output of workers is blocked; the remaining output is dropped")

    def show(self, sink: Sink, data: bytes) -> None:
        """Feed ``sink`` with ``data``, or close it where that is empty; returns at once."""
        with self._changed:
            if self._backlog + len(data) <= LARGEST_BACKLOG:
                self._backlog += len(data)
                self._dropping = False
                self._put((sink, data))
                return
            first, self._dropping = not self._dropping, True
        if first:
            logger.warning("the stream for the output of workers is too slow; some of the output is dropped")

    def _put(self, entry: tuple[Sink, bytes] | None) -> None:
        with self._changed:
            self._waiting.append(entry)
            self._changed.notify()

    def _run(self) -> None:
        broken = False
        while (entry := self._take()) is not None:
            try:
                if not broken:
                    _feed(*entry)
            except Exception as error:  # noqa: BLE001  a stream of the user's may raise anything
                broken = True
                logger.warning("the output of workers cannot be written (%s) and is dropped from here on", error)
            with self._changed:
                self._backlog -= len(entry[1])
                self._shown += 1

    def _take(self) -> tuple[Sink, bytes] | None:
        with self._changed:
            # Bound: the life of the job; abort: None, at the end of the block.
            self._changed.wait_for(lambda: self._waiting)
            return self._waiting.popleft()


def _feed(sink: Sink, data: bytes) -> None:
    if data:
        sink.feed(data)
    else:
        sink.close()
