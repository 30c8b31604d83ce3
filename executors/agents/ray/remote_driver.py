"""The remote driver: an actor that drives the job of a client outside of the cluster."""

from __future__ import annotations

import logging
import pickle
import queue
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from logging.handlers import QueueHandler
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle

from executors.agents.ray.actors import ActorWork
from executors.agents.ray.elastic import ElasticOptions, ElasticRayJob
from executors.agents.ray.job import RayJob
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.settings import MiniSettings
from executors.agents.ray.worker import HorovodWorker
from executors.agents.ray.worker_log import Callback
from executors.api import ExecutorError
from executors.driver.outcome import dump_error
from executors.failures import brief
from executors.job.call import Call
from executors.membership import Limits

# The parts of a driver use these loggers.
LOGGERS = ("executors", "collectives")
# Only how long one question for news lasts: they end it at once, and so does the end of the actor.
LONGEST_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class RemoteEntry:
    """A value that a worker has logged, pickled."""

    data: bytes


@dataclass(frozen=True, slots=True)
class DriverEnd:
    """The end of a call: its value, pickled, or its exception and the cause of that, pickled."""

    value: bytes = b""
    error: bytes = b""
    cause: bytes = b""

    @classmethod
    def of(cls, action: Callable[[], object]) -> DriverEnd:
        """The end of ``action()``."""
        try:
            return cls(value=ray.cloudpickle.dumps(action()))
        except Exception as error:  # noqa: BLE001  the client handles every exception
            return cls(error=_dump(error), cause=_dump(error.__cause__) if error.__cause__ else b"")

    def unwrap(self) -> object:
        """The value. Raises the exception as itself, and ExecutorError for what cannot be unpickled."""
        if not self.error:
            return _load(self.value)
        raise _load(self.error) from (_load(self.cause) if self.cause else None)


News = logging.LogRecord | RemoteEntry | DriverEnd


class RemoteDriver:
    """Drives one job: makes one call at a time, whose end is among the :meth:`news`. Others are answered meanwhile.

    ``level`` is the least level of the log records that are news. A job of fixed workers begins with :meth:`start`.
    """

    _job: RayJob

    def __init__(self, level: int) -> None:
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._resources = ExitStack()
        self._elastic: ElasticRayJob | None = None
        for name in LOGGERS:
            logging.getLogger(name).addHandler(QueueHandler(self._news))
            logging.getLogger(name).setLevel(level)

    def news(self) -> list[News]:
        """The news since the last call. If there are none, the call waits for them, for a moment."""
        found: list[News] = []
        with suppress(queue.Empty):
            found.append(self._news.get(timeout=LONGEST_WAIT_S))
            while True:
                found.append(self._news.get_nowait())
        return found

    def start(
        self, request: RayRequest, settings: MiniSettings, use_current_group: bool, variables: Mapping[str, str]
    ) -> None:
        """Start the workers; see :class:`RayJob`."""
        self._make(lambda: self._start(RayJob(request, settings, use_current_group, variables)))

    def call(self, method: str, call: list[ObjectRef[Call]], ranks: int | None, listens: bool) -> None:
        """Call the workers; see :meth:`RayJob.call`. With ``listens``, what they log is news."""
        self._make(lambda: self._running().call(method, call[0], ranks, self._callbacks(listens)))

    def run_elastic(self, work: ActorWork, limits: Limits, options: ElasticOptions, listens: bool) -> None:
        """Run an elastic job; see :class:`ElasticRayJob`. With ``listens``, what its workers log is news."""
        self._make(lambda: self._run(ElasticRayJob(work, limits, options, self._callbacks(listens))))

    def stop(self) -> bool:
        """Let an elastic job that runs end soon; whether there is one."""
        if self._elastic is not None:
            self._elastic.soon(_stop)
        return self._elastic is not None

    def close(self) -> None:
        """End the workers."""
        self._make(self._resources.close)

    def check(self) -> None:
        """Raise ExecutorError, as the end of the call, if the workers have ended."""
        self._make(self._job.check)

    def workers(self) -> list[ActorHandle[HorovodWorker]]:
        """The actors by rank."""
        return self._running().actors

    def _make(self, action: Callable[[], object]) -> None:
        self._news.put(DriverEnd.of(action))

    def _start(self, job: RayJob) -> None:
        self._job = self._resources.enter_context(closing(job))

    def _run(self, job: ElasticRayJob) -> list[object]:
        with job:
            self._elastic = job
            job.run()
        return job.values()

    def _running(self) -> RayJob:
        self._job.check()
        return self._job

    def _callbacks(self, listens: bool) -> Sequence[Callback]:
        return [lambda value: self._news.put(RemoteEntry(ray.cloudpickle.dumps(value)))] if listens else []


def _stop() -> None:
    raise ExecutorError("the client does not wait for the job any more")


def _dump(error: BaseException) -> bytes:
    try:
        return dump_error(error, ray.cloudpickle.dumps)
    except Exception:  # noqa: BLE001  pickling runs code of the user
        return pickle.dumps(ExecutorError(brief(error)))


def _load(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise ExecutorError(
            f"a result or exception of the workers cannot be unpickled in the client ({brief(error)}); its modules "
            "must be importable in the client too"
        ) from error
