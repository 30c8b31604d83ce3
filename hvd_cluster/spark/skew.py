"""Warns of shards that differ much in their numbers of rows, as those of a DataFrame with all rows in one partition."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from collectives.api import HorovodInternalError
from executors.spark.feeding import FeedingTask

__all__ = ["skew", "warn_of_skew"]

COUNT, COUNTED = "rows/count", "rows/counted"
# The store already has the values; this limits the wait for its answer.
ANSWER_SECONDS = 10.0
MOST_RATIO = 1.5
SHOWN_RANKS = 16


def warn_of_skew(rows: int, batch_size: int, repartition: bool, task: FeedingTask) -> None:
    """Tell the other tasks that this one has seen all of its ``rows``; the last task to do so warns of a skew."""
    store = task.store
    with suppress(HorovodInternalError):  # a job that has ended needs no warning
        store.set(f"{COUNT}/{task.rank}", b"%d" % rows)
        if store.add(COUNTED, 1) < task.size:
            return
        # Bound: ANSWER_SECONDS; abort: the end of the rendezvous server.
        counts = [int(store.get(f"{COUNT}/{rank}", ANSWER_SECONDS)) for rank in range(task.size)]
        if warning := skew(counts, batch_size, repartition):
            task.warn(warning)


def skew(counts: Sequence[int], batch_size: int, repartition: bool) -> str | None:
    """The warning for these numbers of rows by rank; None if they are even enough.

    They are if no rank has more than 1.5 times as many batches as another, or if the difference is one batch.
    """
    least, most = (-(-count // batch_size) for count in (min(counts), max(counts)))
    if most - least < 2 or most <= MOST_RATIO * least:
        return None
    shown = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts[:SHOWN_RANKS]))
    more = f", and {len(counts) - SHOWN_RANKS} more ranks" if len(counts) > SHOWN_RANKS else ""
    remedy = "" if repartition else ", or pass repartition=True, so that Spark distributes the rows evenly"
    return (
        f"the ranks have very different numbers of rows: {shown}{more}. Ranks with fewer rows run out of batches "
        f"first: call hvd.join() after each epoch{remedy}"
    )
