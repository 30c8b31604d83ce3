"""The rows of ``run_on_dataframe``: a feeder for the tasks, and the function that opens the shard in the workers.

The type of a column of arrays does not say how long they are, and each rank sees its own rows. So the first rank that
has a row publishes the lengths, and the others compare theirs: no rank waits for a rank without rows, and no rank reads
a row that does not fit the others.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TypeVar

import numpy as np
import pyarrow as pa

from collectives import HorovodInternalError, Store
from executors import check_integer
from executors.agents.spark import PARTITION, FeedingTask
from hvd_cluster.spark.rows.batches import Order, Shard, Source
from hvd_cluster.spark.rows.columns import Column, ColumnNames, Selection, select
from hvd_cluster.spark.rows.conversion import Array, Converter
from hvd_cluster.spark.rows.elastic_shard import ElasticShard
from hvd_cluster.spark.rows.row_stream import Form, RowWriter, open_reader, open_writer
from hvd_cluster.spark.rows.torch_data_loader import open_epoch_log

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


FIRST, WIDTHS = "rows/first", "rows/widths"
# For the moment between the two messages of the first rank; if that rank dies in between, the job ends earlier.
FIRST_SECONDS = 30.0


def check_widths(widths: Mapping[str, int], rank: int, store: Store) -> None:
    """Compare the ``widths`` of the columns of ``rank`` with those of the first rank that called this.

    Raises ValueError where they differ, and what ``store`` raises: CollectiveTimeoutError, PeerLostError.
    """
    if not widths:
        return
    if store.add(FIRST, 1) == 1:
        store.set(WIDTHS, json.dumps([rank, widths]).encode())
        return
    # Bound: FIRST_SECONDS; abort: the end of the rendezvous server.
    first, known = json.loads(store.get(WIDTHS, FIRST_SECONDS))
    for name, width in widths.items():
        if width != known[name]:
            raise _difference(name, {first: known[name], rank: width})


def _difference(name: str, widths: Mapping[int, int]) -> ValueError:
    (one, width), (other, other_width) = sorted(widths.items())
    return ValueError(
        f"column {name!r} has {width} elements in the rows of rank {one}, but {other_width} in those of rank {other}; "
        "all rows must have the same number: cut the arrays, fill them up, or drop those of another size first"
    )


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
        with open_writer(task.folder, self._forms, self._splits) as writer:
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
        with open_reader(self._forms, self._splits) as stream, open_epoch_log() as epochs:
            training, validation = (Source(stream, split, *selection.sides) for split in (0, 1))
            kept_apart = Shard(validation, replace(order, shuffle=False), epochs, None) if self._splits == 2 else None
            yield Shard(training, order, epochs, kept_apart)

    @property
    def _forms(self) -> list[Form]:
        return [Form(stack.dtype, stack.flat, stack.strings) for stack in self.selection.stacks]

    @property
    def _splits(self) -> int:
        return 2 if self.selection.has_validation else 1


class RowFeed:
    """Brings the rows of one partition to a worker, which inherits ``descriptors`` and gets ``environment``."""

    def __init__(self, rows: Rows, writer: RowWriter, task: FeedingTask) -> None:
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
