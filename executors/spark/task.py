"""One task of the stage: the place of one rank, beside its worker. Runs in the Python that Spark started."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import cloudpickle
import pyarrow
from pyspark import BarrierTaskContext

from collectives.api import PeerLostError
from executors.outcome import Outcome, observe
from executors.spark.feeding import FeedingTask
from executors.spark.line import GOODBYE
from executors.spark.meeting import Member, NoServerError, meet
from executors.spark.plan import Plan, parts
from executors.spark.worker import Worker

__all__ = ["no_rows", "run_task"]

logger = logging.getLogger(__name__)

COLUMNS = pyarrow.schema([("rank", pyarrow.int64()), ("part", pyarrow.int64()), ("data", pyarrow.binary())])


def run_task(plan: Plan, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Meet the other tasks, run the worker, feed it with ``batches``, and yield its outcome as rows.

    Raises only what keeps the tasks from meeting: Spark would end the job with an error of its own.
    """
    try:
        with meet(plan, BarrierTaskContext.get()) as member:
            outcome = _attend(plan, member, _whole(batches))
            if member.line is not None:
                member.line.send(GOODBYE)
    except NoServerError as error:
        outcome = error.outcome
    if outcome is not None:
        yield from _rows(outcome)


def no_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Nothing of ``batches``."""
    for _ in batches:
        pass
    yield from ()


def _attend(plan: Plan, member: Member, batches: Iterator[pyarrow.RecordBatch]) -> Outcome | None:
    with ExitStack() as stack:
        with Worker(plan, member) as worker:
            fed = _observe(member, lambda: _feed(stack, plan, member, batches, worker))
            if fed.failed:
                worker.fail(fed)
        closed = _observe(member, stack.close)
    succeeded = worker.outcome is not None and not worker.outcome.failed
    return closed if succeeded and closed.failed else worker.outcome


def _observe(member: Member, action: Callable[[], None]) -> Outcome:
    return observe(action, member.slot.rank, member.slot.host, member.place.name)


def _feed(stack: ExitStack, plan: Plan, member: Member, batches: Iterator[pyarrow.RecordBatch], worker: Worker) -> None:
    """Start the ``worker`` and feed it; the ``stack`` keeps what it reads from."""
    if plan.feeder is not None:
        task = FeedingTask(member.slot.rank, plan.size, _folder(), member.store, functools.partial(_warn, member))
        feed = stack.enter_context(plan.feeder.open(task))
        worker.start(feed)
        feed.feed(batches, worker.stopped)
    else:
        worker.start()
        for _ in batches:
            pass


def _warn(member: Member, text: str) -> None:
    if member.line is None:
        logger.warning(text)
    else:
        member.line.warn(text)


def _whole(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """All ``batches``. Raises PeerLostError where they break off: the cause is in Spark, which tells it itself."""
    try:
        yield from batches
    except Exception as error:
        raise PeerLostError(f"the rows from Spark broke off ({error})") from error


def _folder() -> str:
    """The folder of this executor for files that end with it; Spark gives several where there are several disks."""
    folders = os.environ["SPARK_LOCAL_DIRS"].split(",")
    return folders[os.getpid() % len(folders)]


def _rows(outcome: Outcome) -> Iterator[pyarrow.RecordBatch]:
    for number, part in enumerate(parts(cloudpickle.dumps(outcome))):
        yield pyarrow.RecordBatch.from_pydict(
            {"rank": [outcome.rank], "part": [number], "data": [part]}, schema=COLUMNS
        )
