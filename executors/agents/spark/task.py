"""One task of the stage, beside the worker of its rank. Runs in the Python that Spark started."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import cloudpickle
import pyarrow
from pyspark import BarrierTaskContext

from collectives import PeerLostError
from executors.agents.spark.broadcasts import exposed
from executors.agents.spark.connection import GOODBYE
from executors.agents.spark.plan import FeedingTask, Plan
from executors.agents.spark.rendezvous import NoServerError, TaskMember, rendezvous
from executors.agents.spark.results import rows_of
from executors.agents.spark.worker import TaskWorker
from executors.driver.outcome import Outcome, observe

logger = logging.getLogger(__name__)


def run_task(plan: Plan, batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Find the other tasks, run the worker, feed it with ``batches``, and send its outcome to the driver.

    Yields the outcome as rows if no connection has taken it. Raises only errors of the rendezvous. After any other
    error Spark would end the job with an error of its own.
    """
    try:
        with exposed(plan.broadcasts, folder), rendezvous(plan, BarrierTaskContext.get()) as member:
            outcome = _run_worker(plan, member, _unbroken(batches))
            delivered = _deliver(member, outcome)
    except NoServerError as error:
        outcome, delivered = error.outcome, False
    if outcome is not None and not delivered:
        yield from rows_of(outcome)


def no_rows(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """Read ``batches`` and yield nothing."""
    for _ in batches:
        pass
    yield from ()


def _run_worker(plan: Plan, member: TaskMember, batches: Iterator[pyarrow.RecordBatch]) -> Outcome | None:
    with ExitStack() as stack:
        with TaskWorker(plan, member) as worker:
            fed = _observe(member, lambda: _feed(stack, plan, member, batches, worker))
            if fed.failed:
                worker.fail(fed)
        closed = _observe(member, stack.close)
    succeeded = worker.outcome is not None and not worker.outcome.failed
    return closed if succeeded and closed.failed else worker.outcome


def _deliver(member: TaskMember, outcome: Outcome | None) -> bool:
    """Whether the driver has the ``outcome``; takes leave of the driver."""
    if member.connection is None:
        return False
    delivered = outcome is None or member.connection.deliver(cloudpickle.dumps(outcome))
    member.connection.send(GOODBYE)
    return delivered


def _observe(member: TaskMember, action: Callable[[], None]) -> Outcome:
    return observe(action, member.slot.rank, member.slot.host, member.location.name)


def _feed(
    stack: ExitStack, plan: Plan, member: TaskMember, batches: Iterator[pyarrow.RecordBatch], worker: TaskWorker
) -> None:
    """Start the ``worker`` and feed it; the ``stack`` owns the feed."""
    if plan.feeder is not None:
        task = FeedingTask(member.slot.rank, plan.size, folder(), member.store, functools.partial(_warn, member))
        feed = stack.enter_context(plan.feeder.open(task))
        worker.start(feed)
        feed.feed(batches, worker.stopped)
    else:
        worker.start()
        for _ in batches:
            pass


def _warn(member: TaskMember, text: str) -> None:
    if member.connection is None:
        logger.warning(text)
    else:
        member.connection.warn(text)


def _unbroken(batches: Iterator[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
    """All ``batches``. Raises PeerLostError if they break off, because Spark itself reports the cause."""
    try:
        yield from batches
    except Exception as error:
        raise PeerLostError(f"the rows from Spark broke off ({error})") from error


def folder() -> str:
    """A folder that Spark removes with the executor. Spark has several if there are several disks."""
    folders = os.environ["SPARK_LOCAL_DIRS"].split(",")
    return folders[os.getpid() % len(folders)]
