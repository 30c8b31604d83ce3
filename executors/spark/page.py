"""The live page of a job whose rendezvous store is in one of its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from executors.dashboard.dashboard import Dashboard
from executors.job import Job
from executors.spark.options import SparkOptions

__all__ = ["live_page"]


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
