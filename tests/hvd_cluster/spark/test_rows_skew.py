"""Shards of very different sizes are reported, once, by the last task that has all of its rows."""

import numpy as np
import pytest
from pyspark.sql.types import FloatType, LongType
from row_feeds import batch, never, rows_of

from collectives.api import PeerLostError
from collectives.store.memory import MemoryStore
from executors.agents.spark.plan import FeedingTask
from hvd_cluster.spark.rows.feed import skew, warn_of_skew

SCHEMA = {"x": FloatType(), "id": LongType()}


def warnings_of(folder, counts, **options):
    """The warnings of each rank, in their order."""
    rows, store, said = rows_of(SCHEMA, "id", **options), MemoryStore(), []
    for rank, count in enumerate(counts):
        said.append([])
        with rows.open(FeedingTask(rank, len(counts), str(folder), store, said[-1].append)) as feed:
            feed.feed(iter([batch(x=np.zeros(count, np.float32), id=np.arange(count))]), never)
    return said


def test_the_last_task_says_the_numbers(tmp_path):
    first, [text] = warnings_of(tmp_path, [1000, 0])
    assert first == []
    assert text.startswith("the ranks have very different numbers of rows: 1000 on rank 0, 0 on rank 1. ")
    assert text.endswith("after each epoch, or pass repartition=True, so that Spark distributes the rows evenly")


def test_what_was_dealt_out_already_is_not_to_be_dealt_out(tmp_path):
    _, [text] = warnings_of(tmp_path, [1000, 10], repartition=True)
    assert text.endswith("call hvd.join() after each epoch")


def test_even_shards_are_no_news(tmp_path):
    assert warnings_of(tmp_path, [100, 104, 97]) == [[], [], []]


@pytest.mark.parametrize(
    ("counts", "skewed"),
    [([0, 0], False), ([1, 0], False), ([32, 0], False), ([33, 0], True), ([320, 200], False), ([330, 200], True)],
)
def test_what_counts_is_batches(counts, skewed):
    assert (skew(counts, 32, False) is not None) is skewed


def test_many_ranks():
    assert "160 on rank 15, and 4 more ranks. " in skew([10 * rank + 10 for rank in range(20)], 1, False)


def test_a_job_that_has_ended_needs_no_warning():
    class Ended(MemoryStore):
        def add(self, key, amount):
            raise PeerLostError("the server ended")

    warn_of_skew(5, 1, False, FeedingTask(0, 1, "", Ended(), pytest.fail))
