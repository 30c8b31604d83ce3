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
from executors.spark.console import Console
from executors.spark.feeding import Feeder
from executors.spark.line import Caller
from executors.spark.plan import SCHEMA, Plan, join
from executors.spark.reason import reason
from executors.spark.session import Session
from executors.spark.task import no_rows, run_task

__all__ = ["SparkOptions", "run_on_spark"]

logger = logging.getLogger(__name__)

# Spark tells of the end of a job a moment after its tasks ended.
NEWS_SECONDS = 2.0
# When a person begins to wonder.
NOTICE_SECONDS = 15.0
# How long the tasks may take to end by themselves, behind a failure and what the grace of their workers is.
FAILURE_SECONDS = 5.0
# Spark kills a Python that does not end by itself after 4 seconds.
CANCEL_SECONDS = 30.0
CANCEL_AGAIN_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How to run a job: what :class:`.plan.Plan` explains, and ``verbose``, which tells the hosts of the ranks."""

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

    Raises the failure at the root: the exception of a worker as itself, with a RemoteError as its cause; WorkerError
    for a worker that died, or whose executor did; StartTimeoutError; ExecutorError for what Spark says.
    """
    news: _News = queue.SimpleQueue()
    secret = JobSecret()
    bound, reached = session.addresses()
    console = Console(
        bound,
        size,
        secret,
        output,
        lambda caller: news.put(_Came(caller)),
        lambda caller: news.put(_Lost(caller)),
        lambda outcome: news.put(_Failed(outcome)),
    )
    with output, console:
        plan = _plan(call, size, secret, (reached, console.port), options)
        with session.watched():
            outcomes = _run(session, frame, plan, options, news)
            if not outcomes:
                # Spark leaves out a stage where it knows that there are no rows. The workers shall run all the same.
                seats = session.spark.range(0, size, 1, size)
                outcomes = _run(session, seats.mapInArrow(no_rows, "id long"), plan, options, news)
    return _values([pickle.loads(outcome) for outcome in outcomes], size)


def _run(session: Session, frame: Any, plan: Plan, options: SparkOptions, news: _News) -> list[bytes]:
    with _Stage(session, frame, plan, news) as stage:
        return _Wait(stage.busy, plan.size, options, news).result()


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
class _Came:
    caller: Caller


@dataclass(frozen=True, slots=True)
class _Lost:
    caller: Caller


@dataclass(frozen=True, slots=True)
class _Failed:
    """A rank failed, with this pickled outcome, which Spark may tell of much later."""

    outcome: bytes


@dataclass(frozen=True, slots=True)
class _Finished:
    """Spark's job ended, with the ``table`` of its rows or with an ``error``."""

    table: Any = None
    error: BaseException | None = None


_News = queue.SimpleQueue[_Came | _Lost | _Failed | _Finished]


class _Stage:
    """The job of Spark, from the beginning of the ``with`` block; leaving the block cancels it, where it still runs.

    Two threads belong to it, the daemons "hvd-spark", which waits for Spark, and "hvd-cancel", which cancels. Where
    Spark does not answer, as a server of Spark Connect that died, leaving gives them up after CANCEL_SECONDS.
    """

    def __init__(self, session: Session, frame: Any, plan: Plan, news: _News) -> None:
        def task(batches: Iterator[Any]) -> Iterator[Any]:
            return run_task(plan, batches)

        self._session = session
        self._tag = f"hvd-{uuid.uuid4().hex}"
        self._frame = frame.mapInArrow(task, SCHEMA, barrier=True)
        self._news = news
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
            logger.warning("Spark does not say that it cancelled the job; it may still run there")

    def busy(self) -> bool:
        """Whether tasks of it run."""
        return self._session.busy(self._tag)

    def _daemon(self, name: str, target: Callable[[], None]) -> threading.Thread:
        run = inheritable_thread_target(self._session.spark)(target)
        return threading.Thread(target=run, name=name, daemon=True)

    def _cancel(self) -> None:
        # Again and again, because Spark forgets a cancellation of what it has not got yet. Bound: CANCEL_SECONDS, and
        # what Spark takes for a call; abort: the end of the job.
        deadline = time.monotonic() + CANCEL_SECONDS
        try:
            while not self._ended.is_set() and time.monotonic() < deadline:
                self._session.cancel(self._tag)
                self._ended.wait(CANCEL_AGAIN_SECONDS)
        except Exception as error:  # noqa: BLE001  whatever Spark says, nobody waits for it
            logger.warning("Spark cannot be told to cancel the job (%s)", error)

    def _run(self) -> None:
        try:
            with self._session.tagged(self._tag):
                result = _Finished() if self._cancelled.is_set() else _Finished(table=self._frame.toArrow())
        except BaseException as error:  # noqa: BLE001  whatever it is, it belongs to the thread that waits
            result = _Finished(error=error)
        self._ended.set()
        self._news.put(result)


class _Wait:
    """The driver's wait for the end of the job."""

    def __init__(self, busy: Callable[[], bool], size: int, options: SparkOptions, news: _News) -> None:
        self._busy = busy
        self._size = size
        self._options = options
        self._news = news
        self._there: set[int] = set()
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
                return _causes(self._failures) or self._after_loss(event.caller)
            if isinstance(event, _Came):
                self._welcome(event.caller)
            elif isinstance(event, _Failed):
                self._note(event.outcome)
            elif self._failures:
                return self._failures
            elif self._busy():
                # The stages before it run, or its tasks do and cannot reach this process.
                self._deadline = time.monotonic() + self._options.start_timeout
            else:
                raise self._too_late()

    def _next(self) -> _Came | _Lost | _Failed | _Finished | None:
        if self._notice is not None and self._notice < (self._deadline or 0.0):
            if (event := self._get(self._notice)) is not None:
                return event
            self._say_who_waits()
        return self._get(self._deadline)

    def _get(self, deadline: float | None) -> _Came | _Lost | _Failed | _Finished | None:
        # Bound: the start timeout, then the end of the job; abort: an exception out of a signal handler.
        try:
            return self._news.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _say_who_waits(self) -> None:
        self._notice = None
        count, size = len(self._there), self._size
        logger.warning("%d of %d workers started so far; Spark computes their rows, or lacks free slots", count, size)

    def _welcome(self, caller: Caller) -> None:
        self._there.add(caller.rank)
        if len(self._there) == self._size and not self._failures:
            self._deadline = None
        if self._options.verbose:
            say(f"rank {caller.rank} of {self._size} is on {caller.host_name}", "hvd_cluster.spark")

    def _note(self, failure: bytes) -> None:
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
        if self._there and not outcomes:
            raise ExecutorError(
                "all workers were ended, because their tasks lost this process: it stood still, or the network did"
            )
        return list(outcomes.values())

    def _after_loss(self, caller: Caller) -> list[bytes]:
        self._deadline = time.monotonic() + NEWS_SECONDS
        event = self._next()
        while event is not None and not isinstance(event, _Finished):
            event = self._next()
        if event is not None and event.error is None:
            outcomes = _outcomes_of(event.table)
            if caller.rank in outcomes or _causes(outcomes.values()):
                return list(outcomes.values())
        elif event is not None:
            logger.debug("what Spark says about it", exc_info=event.error)
        raise _death(caller)

    def _too_late(self) -> StartTimeoutError:
        return StartTimeoutError(
            f"{len(self._there)} of {self._size} workers started within {self._options.start_timeout:g} s; other jobs "
            f"may use the executors, or these have fewer than {self._size} slots, which only the server of Spark "
            "Connect knows, or Python is slow to start: raise start_timeout (or HOROVOD_SPARK_START_TIMEOUT), end the "
            "other jobs, or set a smaller num_proc"
        )


def _outcomes_of(table: Any) -> dict[int, bytes]:
    rows = zip(*(column.to_pylist() for column in table.columns), strict=True)
    return join(list(rows))


def _causes(outcomes: Iterable[bytes]) -> list[bytes]:
    """The failures among pickled ``outcomes``, but for those that follow from the end of another rank."""
    told = [(data, pickle.loads(data)) for data in outcomes]
    return [data for data, outcome in told if outcome.failed and not outcome.consequence]


def _death(caller: Caller) -> WorkerError:
    return WorkerError(
        f"the task of rank {caller.rank} on {caller.host_name} was lost: its executor was killed or ran out of memory, "
        "somebody cancelled the job, or this process or the network stood still; look at the log of the executor",
        caller.rank,
        caller.host,
    )


def _values(outcomes: Sequence[Outcome], size: int) -> list[object]:
    results = values(outcomes)
    silent = sorted(set(range(size)) - {outcome.rank for outcome in outcomes})
    if silent:
        raise ExecutorError(f"Spark returned nothing from ranks {silent}, though no rank failed; report this")
    return results
