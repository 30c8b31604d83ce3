"""The driver's side of one job on Spark: starts the stage, and waits for its workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from executors.agents.spark.broadcasts import PickledCall
from executors.agents.spark.console import Console
from executors.agents.spark.plan import Plan, SparkOptions
from executors.agents.spark.results import SCHEMA, collected
from executors.agents.spark.session import Session
from executors.agents.spark.stage import Stage
from executors.agents.spark.task import no_rows, run_task
from executors.agents.spark.waiting import WorkerWait
from executors.dashboard.dashboard import Dashboard
from executors.job.job import Job
from executors.job.output import Output


@contextmanager
def live_page(
    job: Job, options: SparkOptions, bound: str, reached: Sequence[str]
) -> Iterator[tuple[Dashboard, dict[str, str]]]:
    """The page of ``job``, and what its workers need in their environment.

    Where ``options`` ask for a page, the driver has a store of its own for it, on the address ``bound``; executors may
    reach it at the first one of ``reached``. A worker that cannot is not on the page.
    """
    store = Job(job.size, bound, job.secret)
    with ExitStack() as stack:
        if options.dashboard is not None:
            stack.enter_context(store)
        dashboard = stack.enter_context(Dashboard(store, options.dashboard, "hvd_cluster"))
        yield dashboard, dashboard.variables((reached[0], store.port))


def run_on_spark(
    session: Session, frame: Any, size: int, call: PickledCall, output: Output, options: SparkOptions
) -> list[object]:
    """Run ``call`` on ``size`` workers, one beside each partition of ``frame``; the values by rank.

    Raises the first failure: the exception of a worker as itself, with a RemoteError as its cause; WorkerError for a
    worker that died or lost its executor; StartTimeoutError; ExecutorError for an error of Spark.
    """
    job = Job(size)  # of which the server is not started: one of the tasks has it
    waiting = WorkerWait(job, options)
    bound, reached = session.addresses()
    with output, live_page(job, options, bound, reached) as (page, variables):
        shown = page.watched(output)
        options = replace(options, environment={**options.environment, **variables})
        console = Console(bound, size, job.secret, shown, waiting)
        with console, session.watched():
            plan = _plan(call, job, (reached, console.port), options)
            found = _run(session, frame, plan, waiting)
            if not found:
                # Spark skips a stage when it knows that there are no rows. The workers must run nevertheless.
                ranks = session.spark.range(0, size, 1, size)
                found = _run(session, ranks.mapInArrow(no_rows, "id long"), plan, waiting)
    return found


def _run(session: Session, frame: Any, plan: Plan, waiting: WorkerWait) -> list[object]:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        return run_task(plan, batches)

    tasks = frame.mapInArrow(task, SCHEMA, barrier=True)
    with Stage(session, partial(collected, session, tasks, waiting.missing), waiting.finished) as stage:
        return waiting.values(stage.busy)


def _plan(call: PickledCall, job: Job, console: tuple[Sequence[str], int], options: SparkOptions) -> Plan:
    return Plan(
        call=call.data,
        broadcasts=call.broadcasts,
        size=job.size,
        secret=job.secret,
        console=console,
        environment=options.environment,
        nics=options.nics,
        executable=options.executable,
        start_timeout=options.start_timeout,
        grace=options.grace,
        search_path=options.search_path,
        feeder=options.feeder,
        requested=job.course.requested or 0.0,
    )
