"""One job of Spark: it starts, ends, or is cancelled."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pyspark.util import inheritable_thread_target

from executors.agents.spark.session import Session

logger = logging.getLogger(__name__)

# Spark kills a Python that does not end by itself after 4 seconds.
CANCEL_SECONDS = 30.0
CANCEL_AGAIN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class StageFinished:
    """Spark's job ended, with a ``value`` or with an ``error``."""

    value: Any = None
    error: BaseException | None = None


class Stage:
    """The Spark job that ``compute`` runs, and returns the value of; ``finished`` hears of its end.

    Entering the ``with`` block starts it; leaving the block cancels it if it still runs.

    It owns two daemon threads: "hvd-spark" waits for Spark, "hvd-cancel" cancels. If Spark does not answer, for example
    because the Spark Connect server died, leaving the block abandons them after CANCEL_SECONDS.
    """

    def __init__(
        self, session: Session, compute: Callable[[], object], finished: Callable[[StageFinished], object]
    ) -> None:
        self._session = session
        self._tag = f"hvd-{uuid.uuid4().hex}"
        self._compute = compute
        self._finished = finished
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._thread = self._daemon("hvd-spark", self._run)

    def __enter__(self) -> Stage:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled.set()
        if not self._ended.is_set():
            self._daemon("hvd-cancel", self._cancel).start()
        # Bound: CANCEL_SECONDS, of which Spark needs one or two; abort: an exception out of a signal handler.
        self._thread.join(CANCEL_SECONDS)
        if self._thread.is_alive():
            logger.warning("Spark did not confirm that it cancelled the job; the job may still run")

    def busy(self) -> bool:
        """Whether tasks of the job run."""
        return self._session.busy(self._tag)

    def leaving(self) -> set[int]:
        """The ids of the tasks whose executors Spark decommissions."""
        try:
            return self._session.leaving_tasks(self._tag)
        except Exception:
            logger.debug("Spark did not say which executors leave", exc_info=True)
            return set()

    def _daemon(self, name: str, target: Callable[[], None]) -> threading.Thread:
        run = inheritable_thread_target(self._session.spark)(target)
        return threading.Thread(target=run, name=name, daemon=True)

    def _cancel(self) -> None:
        # Repeated, because Spark forgets the cancellation of a job that it has not received yet. Bound: CANCEL_SECONDS
        # and the duration of one call; abort: the end of the job.
        deadline = time.monotonic() + CANCEL_SECONDS
        try:
            while not self._ended.is_set() and time.monotonic() < deadline:
                self._session.cancel(self._tag)
                self._ended.wait(CANCEL_AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001  any error of Spark; no caller waits for this thread
            logger.warning("the request to cancel the Spark job failed (%s)", error)

    def _run(self) -> None:
        try:
            with self._session.tagged(self._tag):
                result = StageFinished() if self._cancelled.is_set() else StageFinished(self._compute())
        except BaseException as error:  # noqa: BLE001  the waiting thread handles every error
            result = StageFinished(error=error)
        self._ended.set()
        self._finished(result)
