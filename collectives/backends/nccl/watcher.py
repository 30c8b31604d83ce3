"""The thread that looks for failures of communicators, and aborts them together."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from contextlib import ExitStack

from collectives.backends.nccl.interface import NcclConnection

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""The interval of looks. NCCL itself has no timeouts and no notices."""


class Watched(ABC):
    """What the watcher looks at, on its thread."""

    @abstractmethod
    def look(self) -> None:
        """Fail if the communicator has failed, or an operation takes too long."""

    @abstractmethod
    def prepare(self) -> NcclConnection | None:
        """What has to be aborted; None where nothing has. No call of NCCL begins on it any more."""

    @abstractmethod
    def aborted(self) -> None:
        """It has been aborted."""


class Watcher:
    """Looks at all backends of this process, as long as there are any. All methods are safe from any thread."""

    def __init__(self) -> None:
        # Owned by this object, held for a few instructions; the wait for it is bounded by LOOK_SECONDS.
        self._changed = threading.Condition()
        self._watched: list[Watched] = []
        self._is_urgent = False
        self._thread: threading.Thread | None = None

    def add(self, watched: Watched) -> None:
        """Look at ``watched`` from now on."""
        with self._changed:
            self._watched.append(watched)
            if self._thread is None:
                # Owned by this object; ends when nothing is watched. A daemon: an abort inside NCCL may not return.
                self._thread = threading.Thread(target=self._run, name="hvd-nccl-watch", daemon=True)
                self._thread.start()

    def remove(self, watched: Watched) -> None:
        """Do not look at ``watched`` any more."""
        with self._changed:
            self._watched = [each for each in self._watched if each is not watched]
            self._changed.notify_all()

    def wake(self) -> None:
        """Something has failed: look now."""
        with self._changed:
            self._is_urgent = True
            self._changed.notify_all()

    def _run(self) -> None:
        while watched := self._next():
            try:
                self._look(watched)
            except Exception:
                logger.exception("a look at NCCL's communicators failed")

    def _next(self) -> list[Watched]:
        with self._changed:
            if not self._is_urgent and self._watched:
                self._changed.wait(LOOK_SECONDS)
            self._is_urgent = False
            if not self._watched:
                self._thread = None
            return list(self._watched)

    def _look(self, watched: list[Watched]) -> None:
        for each in watched:
            each.look()
        failed = [(each, link) for each in watched if (link := each.prepare()) is not None]
        try:
            _abort([link for _, link in failed])
        finally:
            for each, _ in failed:
                each.aborted()


def _abort(links: list[NcclConnection]) -> None:
    """In one group: on one GPU, the end of one communicator may wait for the operations of another."""
    if not links:
        return
    with ExitStack() as stack:
        stack.enter_context(links[0].device.current())
        stack.enter_context(links[0].library.group())
        for link in links:
            _abort_one(link)


def _abort_one(link: NcclConnection) -> None:
    try:
        link.communicator.abort()
    except Exception:
        logger.exception("the abort of a communicator failed; its operations may stay on the GPU")
