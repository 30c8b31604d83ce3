"""The driver's side of one job on Spark: starts the stage, waits for it, collects the outcomes."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from pyspark.util import inheritable_thread_target

from executors.api import ExecutorError, JobSecret, StartTimeoutError, WorkerError
from executors.local.crew import GRACE_SECONDS
from executors.local.output import Output, say
from executors.outcome import Outcome, values
from executors.spark.connection import TaskIdentity
from executors.spark.console import Console
from executors.spark.feeding import Feeder
from executors.spark.plan import SCHEMA, Plan, assemble
from executors.spark.reason import reason
from executors.spark.session import Session
from executors.spark.task import no_rows, run_task

__all__ = ["SparkOptions", "run_on_spark"]

logger = logging.getLogger(__name__)

# Spark reports the end of a job a moment after its tasks ended.
END_NEWS_SECONDS = 2.0
# After this time a waiting user is told how many workers have started.
NOTICE_SECONDS = 15.0
# After a failure, the tasks may take this long to end by themselves, besides the grace of their workers.
FAILURE_SECONDS = 5.0
# Spark kills a Python that does not end by itself after 4 seconds.
CANCEL_SECONDS = 30.0
CANCEL_AGAIN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How to run a job: see :class:`.plan.Plan`. With ``verbose`` the driver prints the host of each rank."""

    start_timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)
    nics: tuple[str, ...] = ()
    executable: str | None = None
    search_path: Callable[[str], str] | None = None
    feeder: Feeder | None = None
    grace: float = GRACE_SECONDS
    verbose: bool = False


def run_on_spark(
    session: Session, frame: Any, size: int, call: bytes, output: Output, options: SparkOptions
) -> list[object]:
    """Run ``call`` on ``size`` workers, one beside each partition of ``frame``; the values by rank.

    Raises the first failure: the exception of a worker as itself, with a RemoteError as its cause; WorkerError for a
    worker that died or lost its executor; StartTimeoutError; ExecutorError for an error of Spark.
    """
    events: _Events = queue.SimpleQueue()
    secret = JobSecret()
    bound, reached = session.addresses()
    console = Console(
        bound,
        size,
        secret,
        output,
        lambda identity: events.put(_Connected(identity)),
        lambda identity: events.put(_Lost(identity)),
        lambda outcome: events.put(_Failed(outcome)),
    )
    with output, console:
        plan = _plan(call, size, secret, (reached, console.port), options)
        with session.watched():
            outcomes = _run(session, frame, plan, options, events)
            if not outcomes:
                # Spark skips a stage when it knows that there are no rows. The workers must run nevertheless.
                ranks = session.spark.range(0, size, 1, size)
                outcomes = _run(session, ranks.mapInArrow(no_rows, "id long"), plan, options, events)
    return _values([pickle.loads(outcome) for outcome in outcomes], size)


def _run(session: Session, frame: Any, plan: Plan, options: SparkOptions, events: _Events) -> list[bytes]:
    with _Stage(session, frame, plan, events) as stage:
        return _Wait(stage.busy, plan.size, options, events).result()


def _plan(call: bytes, size: int, secret: JobSecret, console: tuple[Sequence[str], int], options: SparkOptions) -> Plan:
    return Plan(
        call=call,
        size=size,
        secret=secret,
        console=console,
        environment=options.environment,
        nics=options.nics,
        executable=options.executable,
        start_timeout=options.start_timeout,
        grace=options.grace,
        search_path=options.search_path,
        feeder=options.feeder,
    )


@dataclass(frozen=True, slots=True)
class _Connected:
    identity: TaskIdentity


@dataclass(frozen=True, slots=True)
class _Lost:
    identity: TaskIdentity


@dataclass(frozen=True, slots=True)
class _Failed:
    """A rank failed, with this pickled outcome. Spark itself may report it much later."""

    outcome: bytes


@dataclass(frozen=True, slots=True)
class _Finished:
    """Spark's job ended, with the ``table`` of its rows or with an ``error``."""

    table: Any = None
    error: BaseException | None = None


_Events = queue.SimpleQueue[_Connected | _Lost | _Failed | _Finished]


class _Stage:
    """The Spark job. Entering the ``with`` block starts it; leaving the block cancels it if it still runs.

    It owns two daemon threads: "hvd-spark" waits for Spark, "hvd-cancel" cancels. If Spark does not answer, for example
    because the Spark Connect server died, leaving the block abandons them after CANCEL_SECONDS.
    """

    def __init__(self, session: Session, frame: Any, plan: Plan, events: _Events) -> None:
        def task(batches: Iterator[Any]) -> Iterator[Any]:
            return run_task(plan, batches)

        self._session = session
        self._tag = f"hvd-{uuid.uuid4().hex}"
        self._frame = frame.mapInArrow(task, SCHEMA, barrier=True)
        self._events = events
        self._ended = threading.Event()
        self._cancelled = threading.Event()
        self._thread = self._daemon("hvd-spark", self._run)

    def __enter__(self) -> _Stage:
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
                result = _Finished() if self._cancelled.is_set() else _Finished(table=self._frame.toArrow())
        except BaseException as error:  # noqa: BLE001  the waiting thread handles every error
            result = _Finished(error=error)
        self._ended.set()
        self._events.put(result)


class _Wait:
    """The driver's wait for the end of the job."""

    def __init__(self, busy: Callable[[], bool], size: int, options: SparkOptions, events: _Events) -> None:
        self._busy = busy
        self._size = size
        self._options = options
        self._events = events
        self._ranks_there: set[int] = set()
        self._failures: list[bytes] = []
        self._deadline: float | None = time.monotonic() + options.start_timeout
        self._notice: float | None = time.monotonic() + NOTICE_SECONDS

    def result(self) -> list[bytes]:
        """The pickled outcomes, of all ranks or of some that failed. Raises StartTimeoutError, WorkerError,
        ExecutorError.
        """
        while True:
            event = self._next()
            if isinstance(event, _Finished):
                return self._after_end(event)
            if isinstance(event, _Lost):
                return _causes(self._failures) or self._after_loss(event.identity)
            if isinstance(event, _Connected):
                self._note_connected(event.identity)
            elif isinstance(event, _Failed):
                self._add_failure(event.outcome)
            elif self._failures:
                return self._failures
            elif self._busy():
                # Earlier stages run, or the tasks run but cannot reach this process.
                self._deadline = time.monotonic() + self._options.start_timeout
            else:
                raise self._start_timeout()

    def _next(self) -> _Connected | _Lost | _Failed | _Finished | None:
        if self._notice is not None and self._notice < (self._deadline or 0.0):
            if (event := self._get(self._notice)) is not None:
                return event
            self._log_progress()
        return self._get(self._deadline)

    def _get(self, deadline: float | None) -> _Connected | _Lost | _Failed | _Finished | None:
        # Bound: the start timeout, then the end of the job; abort: an exception out of a signal handler.
        try:
            return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _log_progress(self) -> None:
        self._notice = None
        count, size = len(self._ranks_there), self._size
        logger.warning("%d of %d workers started so far; Spark computes their rows, or lacks free slots", count, size)

    def _note_connected(self, identity: TaskIdentity) -> None:
        self._ranks_there.add(identity.rank)
        if len(self._ranks_there) == self._size and not self._failures:
            self._deadline = None
        if self._options.verbose:
            say(f"rank {identity.rank} of {self._size} is on {identity.host_name}", "hvd_cluster.spark")

    def _add_failure(self, failure: bytes) -> None:
        if not self._failures:
            self._deadline = time.monotonic() + self._options.grace + FAILURE_SECONDS
        self._failures.append(failure)

    def _after_end(self, end: _Finished) -> list[bytes]:
        if end.error is not None:
            logger.debug("Spark could not run the workers", exc_info=end.error)
            if causes := _causes(self._failures):
                return causes
            raise ExecutorError(f"Spark could not run the workers: {reason(str(end.error))}") from None
        outcomes = _outcomes_of(end.table)
        if self._ranks_there and not outcomes:
            raise ExecutorError(
                "all workers ended because their tasks lost the connection to this process: it was stopped for too "
                "long, or the network failed"
            )
        return list(outcomes.values())

    def _after_loss(self, identity: TaskIdentity) -> list[bytes]:
        self._deadline = time.monotonic() + END_NEWS_SECONDS
        event = self._next()
        while event is not None and not isinstance(event, _Finished):
            event = self._next()
        if event is not None and event.error is None:
            outcomes = _outcomes_of(event.table)
            if identity.rank in outcomes or _causes(outcomes.values()):
                return list(outcomes.values())
        elif event is not None:
            logger.debug("the error of Spark", exc_info=event.error)
        raise _death(identity)

    def _start_timeout(self) -> StartTimeoutError:
        return StartTimeoutError(
            f"{len(self._ranks_there)} of {self._size} workers started within {self._options.start_timeout:g} s. Other "
            f"jobs may use the executors, these may have fewer than {self._size} slots, or Python may be slow to "
            "start: raise start_timeout (or HOROVOD_SPARK_START_TIMEOUT), end the other jobs, or set a smaller num_proc"
        )


def _outcomes_of(table: Any) -> dict[int, bytes]:
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return assemble(list(rows))


def _causes(outcomes: Iterable[bytes]) -> list[bytes]:
    """The failures among pickled ``outcomes``, without those that are a consequence of another rank's end."""
    loaded = [(data, pickle.loads(data)) for data in outcomes]
    return [data for data, outcome in loaded if outcome.failed and not outcome.consequence]


def _death(identity: TaskIdentity) -> WorkerError:
    return WorkerError(
        f"the task of rank {identity.rank} on {identity.host_name} was lost: its executor was killed or ran out of "
        "memory, the job was cancelled, or this process or the network stopped responding; look at the log of the "
        "executor",
        identity.rank,
        identity.host,
    )


def _values(outcomes: Sequence[Outcome], size: int) -> list[object]:
    results = values(outcomes)
    silent = sorted(set(range(size)) - {outcome.rank for outcome in outcomes})
    if silent:
        raise ExecutorError(f"Spark returned no result of ranks {silent}, although no rank failed; report this")
    return results
