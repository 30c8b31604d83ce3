"""The rows of ``run_on_dataframe``: a feeder for the tasks, and the function that opens the shard in the workers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import pyarrow as pa

from executors.arguments import check_integer
from executors.spark.feeding import PARTITION, FeedingTask
from hvd_cluster.spark.columns import Column, ColumnNames, Selection, select
from hvd_cluster.spark.conversion import Array, Converter
from hvd_cluster.spark.elastic_shard import ElasticShard
from hvd_cluster.spark.epochs import open_epoch_log
from hvd_cluster.spark.shard import Order, Shard, Source
from hvd_cluster.spark.skew import warn_of_skew
from hvd_cluster.spark.spill import Form, SpillWriter, open_reader, open_writer
from hvd_cluster.spark.widths import check_widths

__all__ = ["Rows"]

T = TypeVar("T")

PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """How the rows of a DataFrame become batches. Can be pickled: tasks and workers get a copy."""

    selection: Selection
    batch_size: int
    shuffle: bool
    seed: int
    repartition: bool = False

    @classmethod
    def of(
        cls,
        schema: Any,
        label_cols: ColumnNames,
        feature_cols: ColumnNames | None = None,
        batch_size: SupportsIndex = 32,
        validation: float | str | None = None,
        shuffle: bool = True,
        seed: SupportsIndex = 0,
        sample_weight_col: str | None = None,
        repartition: bool = False,
    ) -> Rows:
        """From the arguments of ``run_on_dataframe`` and the schema of the DataFrame. Raises ValueError."""
        size, seed = check_integer(batch_size, "batch_size", 1), check_integer(seed, "seed", 0)
        selection = select(schema, feature_cols, label_cols, validation, sample_weight_col)
        return cls(selection, size, bool(shuffle), seed, bool(repartition))

    @property
    def columns(self) -> list[str]:
        """The columns that the record batches must have, in this order."""
        return self.selection.names

    @contextmanager
    def open(self, task: FeedingTask) -> Iterator[RowFeed]:
        """The feed of ``task``."""
        selection = self.selection
        with open_writer(task.folder, len(selection.stacks), 2 if selection.has_validation else 1) as writer:
            yield RowFeed(self, writer, task)

    def on_shard(self, fn: Callable[..., T]) -> Callable[..., T]:
        """The function for the workers, which calls ``fn(shard, *args, **kwargs)``."""

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> T:
            with self.shard(int(os.environ["HOROVOD_RANK"])) as shard:
                return fn(shard, *args, **kwargs)

        return call

    def on_elastic_shard(self, fn: Callable[..., T]) -> Callable[..., T]:
        """The same for workers that come and go: ``shard`` is an :class:`.elastic_shard.ElasticShard`."""

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> T:
            number = int(os.environ[PARTITION])
            with self.shard(number) as shard:
                return fn(ElasticShard(shard, number), *args, **kwargs)

        return call

    @contextmanager
    def shard(self, rank: int) -> Iterator[Shard]:
        """The rows of this worker, which is ``rank``; once in a process. ``rank`` is a part of the seed of orders."""
        selection, order = self.selection, Order(self.batch_size, self.shuffle, self.seed, rank)
        forms = [Form(stack.dtype, stack.flat) for stack in selection.stacks]
        splits = 2 if selection.has_validation else 1
        with open_reader(forms, splits) as spill, open_epoch_log() as epochs:
            training, validation = (Source(spill, split, *selection.sides) for split in (0, 1))
            kept_apart = Shard(validation, replace(order, shuffle=False), epochs, None) if splits == 2 else None
            yield Shard(training, order, epochs, kept_apart)


class RowFeed:
    """Brings the rows of one partition to a worker, which inherits ``descriptors`` and gets ``environment``."""

    def __init__(self, rows: Rows, writer: SpillWriter, task: FeedingTask) -> None:
        self.descriptors: Sequence[int] = writer.descriptors
        self.environment: Mapping[str, str] = writer.environment
        self._task = task
        self._rows = rows
        self._selection = rows.selection
        self._writer = writer
        self._converter = Converter(rows.selection)
        self._generator = np.random.default_rng(rows.seed)
        self._checked = False

    def feed(self, batches: Iterator[pa.RecordBatch], stopped: Callable[[], bool]) -> None:
        """Write all ``batches``, unless ``stopped()``.

        Raises ValueError for rows that cannot be used, or that do not fit those of other ranks, ExecutorError where the
        disk is full.
        """
        for batch in _pieces(batches):
            if stopped():
                return
            for split, arrays in enumerate(self._split(batch)):
                self._writer.append(split, arrays)
            self._check_once()
            self._writer.announce()
        self._writer.finish()
        warn_of_skew(self._writer.rows[0], self._rows.batch_size, self._rows.repartition, self._task)

    def _check_once(self) -> None:
        if not self._checked:
            check_widths(self._converter.widths, self._task.rank, self._task.store)
            self._checked = True

    def _split(self, batch: pa.RecordBatch) -> list[list[Array]]:
        """The arrays of the rows for training and, if there are any, of those for validation."""
        arrays = self._converter.arrays(batch)
        if not self._selection.has_validation:
            return [arrays]
        kept_apart = self._is_validation(batch)
        return [[array[rows] for array in arrays] for rows in (~kept_apart, kept_apart)]

    def _is_validation(self, batch: pa.RecordBatch) -> Array:
        validation = self._selection.validation
        if isinstance(validation, Column):
            return self._converter.is_validation(validation, batch)
        chosen: Array = self._generator.random(batch.num_rows) < validation
        return chosen


def _pieces(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of ``batches`` in smaller ones, none of them empty."""
    for batch in batches:
        rows = max(1, PIECE_BYTES * batch.num_rows // max(batch.nbytes, 1))
        yield from (batch.slice(first, rows) for first in range(0, batch.num_rows, rows))
