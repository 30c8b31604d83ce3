"""Rows from Arrow batches to a shard, as between a task of Spark and its worker, in one process."""

import os
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pyarrow as pa
from pyspark.sql.types import DoubleType, FloatType, LongType, StructField, StructType

from collectives.store.memory import MemoryStore
from executors.agents.spark.plan import FeedingTask
from hvd_cluster.spark.rows.feed import Rows
from hvd_cluster.spark.rows.row_stream import VARIABLE


def rows_of(schema, label_cols, feature_cols=None, batch_size=4, validation=None, shuffle=False, seed=0, **options):
    """``schema`` is a dictionary: name -> type of Spark."""
    fields = [StructField(name, kind) for name, kind in schema.items()]
    return Rows.of(StructType(fields), label_cols, feature_cols, batch_size, validation, shuffle, seed, **options)


def feed_of(rows, folder, rank=0, store=None):
    """The feed of a task, the last one of its job; the others are those with the same ``store``, if any."""
    return rows.open(FeedingTask(rank, rank + 1, str(folder), store or MemoryStore(), print))


@contextmanager
def opened(rows, folder, rank=0, store=None):
    """A feed, and the shard that reads from it."""
    with feed_of(rows, folder, rank, store) as feed, inherited(feed), rows.shard(rank) as shard:
        yield feed, shard


@contextmanager
def shard_of(rows, folder, batches, rank=0):
    """A shard whose rows have all come."""
    with opened(rows, folder, rank) as (feed, shard):
        feed.feed(iter(batches), never)
        yield shard


@contextmanager
def inherited(feed):
    """This process has the descriptors a second time, as a worker has them."""
    descriptors = [os.dup(int(descriptor)) for descriptor in feed.environment[VARIABLE].split()]
    with mock.patch.dict(os.environ, {VARIABLE: " ".join(str(descriptor) for descriptor in descriptors)}):
        yield


def never():
    return False


def batch(**columns):
    return pa.record_batch(columns)


NUMBERED = {"x": FloatType(), "y": DoubleType(), "id": LongType()}
"""The schema of :func:`numbered`."""


def numbered(*sizes):
    """Batches of these sizes; the rows are numbered through all of them."""
    first = 0
    for size in sizes:
        ids = np.arange(first, first + size)
        yield batch(x=ids.astype(np.float32), y=ids * 2.0, id=ids)
        first += size
