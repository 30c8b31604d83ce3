"""All ranks have the same number of elements in columns of arrays, or none of them reads a row that does not fit."""

import threading
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, FloatType, LongType
from row_feeds import batch, feed_of, inherited, never, opened, rows_of

from collectives.api import CollectiveTimeoutError
from collectives.store.memory import MemoryStore
from executors.api import ExecutorError
from hvd_cluster.spark.rows import feed
from hvd_cluster.spark.rows.feed import check_widths

SCHEMA = {"pair": ArrayType(FloatType()), "id": LongType()}


def arrays(width, rows=4):
    values = pa.array([[float(row)] * width for row in range(rows)], pa.list_(pa.float32()))
    return batch(pair=values, id=np.arange(rows))


def test_ranks_that_agree():
    store = MemoryStore()
    for rank in (2, 0, 1):
        check_widths({"a": 2, "b": 7}, rank, store)


@pytest.mark.parametrize("order", [(0, 3), (3, 0)], ids=["low rank first", "high rank first"])
def test_ranks_that_differ_are_named_with_the_column(order):
    known = {0: {"a": 2, "b c": 7}, 3: {"a": 2, "b c": 5}}
    store = MemoryStore()
    check_widths(known[order[0]], order[0], store)
    with pytest.raises(ValueError, match="column 'b c' has 7 elements in the rows of rank 0, but 5 in those of rank 3"):
        check_widths(known[order[1]], order[1], store)


def test_columns_of_one_width_need_no_store():
    check_widths({}, 0, None)


def test_the_second_waits_for_the_first():
    """The rank that has claimed to be the first has not published its widths yet."""
    store, error = MemoryStore(), []

    def second():
        try:
            check_widths({"a": 3}, 1, store)
        except ValueError as found:
            error.append(found)

    store.add(feed.FIRST, 1)
    thread = threading.Thread(target=second)
    thread.start()
    store.set(feed.WIDTHS, b'[0, {"a": 2}]')
    thread.join(30)
    assert "2 elements in the rows of rank 0, but 3 in those of rank 1" in str(error)


def test_a_first_one_that_died_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(feed, "FIRST_SECONDS", 0.01)
    store = MemoryStore()
    store.add(feed.FIRST, 1)
    with pytest.raises(CollectiveTimeoutError):
        check_widths({"a": 3}, 1, store)


@pytest.mark.parametrize("validation", [None, 0.5])
def test_no_worker_reads_rows_that_do_not_fit(tmp_path, validation):
    rows, store = rows_of(SCHEMA, "id", validation=validation), MemoryStore()
    with opened(rows, tmp_path, 0, store) as (feed, shard):
        feed.feed(iter([arrays(2, 100)]), never)
        assert {features.shape[1] for features, _ in shard} == {2}
    with ExitStack() as task:
        feed = task.enter_context(feed_of(rows, tmp_path, 1, store))
        with inherited(feed), rows.shard(1) as shard:
            with pytest.raises(ValueError, match="2 elements in the rows of rank 0, but 3 in those of rank 1"):
                feed.feed(iter([arrays(2, 0), arrays(3, 100)]), never)
            task.close()
            with pytest.raises(ExecutorError, match="ended before"):
                next(iter(shard))


def test_a_rank_without_rows_is_none_to_agree_with(tmp_path):
    rows, store = rows_of(SCHEMA, "id"), MemoryStore()
    for rank, batches in enumerate([[arrays(2, 0)], [arrays(2), arrays(2)], [arrays(2)]]):
        with opened(rows, tmp_path, rank, store) as (feed, shard):
            feed.feed(iter(batches), never)
            assert [features.shape for features, _ in shard] == [(4, 2)] * (len(batches) if rank else 0)
