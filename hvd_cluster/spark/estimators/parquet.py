"""Rows in Parquet files of a store: each worker reads its part of them in every epoch, and keeps no copy.

:func:`prepare_data` writes them; it is here in place of Horovod's ``horovod.spark.common.util``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
from pyarrow import fs as pafs
from pyarrow import parquet

from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.spark.estimators.columns import quoted, with_boolean_validation
from hvd_cluster.spark.estimators.store import AbstractFilesystemStore
from hvd_cluster.spark.rows import order as row_order
from hvd_cluster.spark.rows.batches import Order, Shard, Source
from hvd_cluster.spark.rows.columns import Column
from hvd_cluster.spark.rows.conversion import Array, Converter
from hvd_cluster.spark.rows.feed import Rows
from hvd_cluster.spark.rows.strings import array_bytes
from hvd_cluster.spark.rows.torch_data_loader import current_worker

if TYPE_CHECKING:  # a worker, which does not need PySpark, loads this module for the shard
    from pyspark.sql import DataFrame

__all__ = ["ParquetRows", "ParquetShard", "check_validation", "prepare_data", "to_list"]

T = TypeVar("T")

ROWS_AT_ONCE = 1 << 16
SPLIT_SEED = 0


@dataclass(frozen=True)
class Piece:
    """Rows of one row group of a file: ``count`` from ``first`` on, of ``rows``; ``number`` is that of the group."""

    path: str
    group: int
    number: int
    rows: int
    first: int
    count: int


def share(groups: Sequence[Piece], rank: int, size: int) -> list[Piece]:
    """The rows of ``rank`` among ``size`` ranks: neighbours, and equally many as any other rank, but for one."""
    total = sum(group.rows for group in groups)
    begin, end = total * rank // size, total * (rank + 1) // size
    found, start = [], 0
    for group in groups:
        first, last = max(begin - start, 0), min(end - start, group.rows)
        if first < last:
            found.append(replace(group, first=first, count=last - first))
        start += group.rows
    return found


@dataclass(frozen=True)
class ParquetRows:
    """The rows below ``path`` in ``store``, as ``rows`` says; those for validation may be below a path of their own.

    Can be pickled: workers get a copy.
    """

    store: Any
    path: str
    rows: Rows
    validation_path: str | None = None

    def on_shard(self, fn: Callable[..., T]) -> Callable[..., T]:
        """The function for the workers, which calls ``fn(shard, *args)``."""

        @functools.wraps(fn)
        def call(*args: Any) -> T:
            basics.init()
            return fn(self.shard(basics.rank(), basics.size()), *args)

        return call

    def shard(self, rank: int, size: int) -> ParquetShard:
        """The rows of ``rank``. Raises ValueError where there are no files."""
        order = Order(self.rows.batch_size, self.rows.shuffle, self.rows.seed, rank)
        pieces = share(self._groups(self.path), rank, size)
        in_order, splits = replace(order, shuffle=False), self.rows.selection.has_validation
        if self.validation_path is not None:
            others = share(self._groups(self.validation_path), rank, size)
            kept_apart: ParquetShard | None = ParquetShard(self, others, in_order, None, None)
        else:
            kept_apart = ParquetShard(self, pieces, in_order, True, None) if splits else None
        return ParquetShard(self, pieces, order, False if splits else None, kept_apart)

    @property
    def filesystem(self) -> pafs.FileSystem:
        """That of the store."""
        found: pafs.FileSystem = self.store.fs
        return found

    def _groups(self, path: str) -> list[Piece]:
        files = self.store.get_parquet_dataset(path).files
        found: list[Piece] = []
        for file in sorted(files):
            metadata = parquet.read_metadata(file, filesystem=self.filesystem)
            for group in range(metadata.num_row_groups):
                rows = metadata.row_group(group).num_rows
                found.append(Piece(file, group, len(found), rows, 0, rows))
        return found


class ParquetShard(Shard):
    """The rows of one rank in Parquet files, in batches as those of a :class:`Shard`.

    With a random order, row groups come in another order in each epoch, and rows are mixed with those that are in
    memory at the same time, 16 MiB or one batch. A ``DataLoader`` cannot read it in several processes.
    """

    def __init__(
        self, source: ParquetRows, pieces: Sequence[Piece], order: Order, kept_apart: bool | None, validation: Any
    ) -> None:
        nothing: Any = None
        super().__init__(Source(nothing, 0, *source.rows.selection.sides), order, nothing, validation)
        self._parquet = source
        self._pieces = list(pieces)
        self._kept_apart = kept_apart
        self._numbers = itertools.count()
        self._rows: int | None = None

    @property
    def rows(self) -> int:
        """The number of rows. The first call reads them all, where a part of them is for validation."""
        if self._kept_apart is None:
            return sum(piece.count for piece in self._pieces)
        if self._rows is None:
            self._rows = sum(len(arrays[0]) for arrays in self._arrays(self._pieces))
        return self._rows

    @override
    def widths(self) -> tuple[int, ...]:
        """The number of elements of a row in each array; nothing if there are no rows. Reads the first ones."""
        first = next(self._arrays(self._pieces), ())
        return tuple(1 if array.ndim == 1 else array.shape[1] for array in first)

    @override
    def _epoch(self) -> Iterator[list[Array]]:
        if current_worker().count > 1:
            raise ValueError("a DataLoader cannot read Parquet files in several processes; use num_workers=0")
        if not self._order.shuffle:
            yield from self._windows_of(self._pieces, None)
            return
        generator = np.random.default_rng([self._order.seed, self._order.rank, next(self._numbers)])
        pieces = [self._pieces[index] for index in generator.permutation(len(self._pieces))]
        yield from self._windows_of(pieces, generator)

    def _windows_of(self, pieces: Sequence[Piece], generator: np.random.Generator | None) -> Iterator[list[Array]]:
        """Arrays of whole batches, but for the last ones."""
        size, waiting = self._order.batch_size, _Waiting()
        for arrays in self._arrays(pieces):
            waiting.append(arrays)
            if waiting.rows >= size and waiting.bytes >= row_order.WINDOW_BYTES:
                yield waiting.take(waiting.rows - waiting.rows % size, generator)
        if waiting.rows:
            yield waiting.take(waiting.rows, generator)

    def _arrays(self, pieces: Sequence[Piece]) -> Iterator[list[Array]]:
        """The arrays of the rows of this shard, as they stand in the files."""
        converter = Converter(self._parquet.rows.selection)
        for piece in pieces:
            for first, batch in self._batches(piece):
                arrays = converter.arrays(batch)
                chosen = self._chosen(piece, first, batch, converter)
                found = arrays if chosen is None else [array[chosen] for array in arrays]
                if len(found[0]):
                    yield found

    def _batches(self, piece: Piece) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Record batches of the piece, each with the number of its first row in the row group."""
        names = self._parquet.rows.columns
        with self._parquet.filesystem.open_input_file(piece.path) as source:
            first, end = 0, piece.first + piece.count
            for batch in parquet.ParquetFile(source).iter_batches(ROWS_AT_ONCE, [piece.group], names):
                begin, stop = max(piece.first - first, 0), min(end - first, batch.num_rows)
                if begin < stop:
                    yield first + begin, batch.slice(begin, stop - begin).select(names)
                first += batch.num_rows

    def _chosen(self, piece: Piece, first: int, batch: pa.RecordBatch, converter: Converter) -> Array | None:
        """Which rows of ``batch`` are in this shard; None: all."""
        if self._kept_apart is None:
            return None
        validation = self._parquet.rows.selection.validation
        if isinstance(validation, Column):
            found: Array = converter.is_validation(validation, batch)
        else:  # the same rows, whatever the number of ranks
            generator = np.random.default_rng([self._order.seed, piece.number])
            found = (generator.random(piece.rows) < validation)[first : first + batch.num_rows]
        return found if self._kept_apart else ~found


class _Waiting:
    """Arrays of rows that are not in a window yet."""

    def __init__(self) -> None:
        self._parts: list[list[Array]] = []
        self.rows = self.bytes = 0

    def append(self, arrays: list[Array]) -> None:
        self._parts.append(arrays)
        self.rows += len(arrays[0])
        self.bytes += sum(map(array_bytes, arrays))

    def take(self, rows: int, generator: np.random.Generator | None) -> list[Array]:
        """The first ``rows``, mixed with the others where there is a ``generator``."""
        arrays = [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]
        if generator is not None:
            indices = generator.permutation(self.rows)
            arrays = [array[indices] for array in arrays]
        rest = [array[rows:] for array in arrays]
        self._parts, self.rows, self.bytes = [], 0, 0
        if len(rest[0]):
            self.append(rest)
        return [array[:rows] for array in arrays]


@contextmanager
def prepare_data(
    num_processes: int,
    store: AbstractFilesystemStore,
    df: DataFrame,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: float | str | None = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int = 10,
    verbose: int = 0,
) -> Iterator[int]:
    """Write the rows of ``df`` into the store; gives the ``dataset_idx`` for ``fit_on_parquet``.

    Rows for validation get a folder of their own: a fraction, by a fixed seed, or those above 0 in the column
    ``validation``. The files stay in the store. ``compress_sparse`` and ``verbose`` have no effect.

    Args:
        num_processes: the number of workers; there are ``partitions_per_process`` files for each of them.
        store: where to write.
        df: the rows.
        label_columns, feature_columns, sample_weight_col: the columns to write.
        validation: a fraction, the name of a column, or None.
        compress_sparse, partitions_per_process, verbose: see above.

    Raises:
        ValueError: a column does not exist, or cannot be a tensor; nothing was written.
        TypeError: ``df`` is no DataFrame of Spark.
    """
    from hvd_cluster.spark.dataframe import require_dataframe, rows_of

    require_dataframe(df)
    check_validation(validation, df)
    marked = with_boolean_validation(df, validation)
    features = [[name] for name in feature_columns]
    rows_of(marked, list(label_columns), features, 1, validation, sample_weight_col=sample_weight_col)
    number = next(each for each in itertools.count() if not store.exists(store.get_train_data_path(each)))
    paths = store.get_train_data_path(number), store.get_val_data_path(number)
    names = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    for part, path in zip(_parts(marked, validation), paths, strict=False):
        files = part.select(*map(quoted, names)).repartition(num_processes * partitions_per_process)
        files.write.parquet(store.get_full_path(path))
    yield number


def _parts(df: DataFrame, validation: float | str | None) -> list[DataFrame]:
    """The rows for training and, if there are any, those for validation."""
    from pyspark.sql import functions as F

    if isinstance(validation, str):
        column = quoted(validation)
        kept_apart = column if df.schema[validation].dataType.typeName() == "boolean" else column > 0
        kept_apart = F.when(column.isNotNull(), kept_apart).otherwise(
            F.raise_error(F.lit(f"the validation column {validation!r} has a null; give each row a value"))
        )
        return [df.where(~kept_apart), df.where(kept_apart)]
    return df.randomSplit([1 - validation, validation], SPLIT_SEED) if validation else [df]


def check_validation(validation: Any, df: DataFrame | None = None) -> None:
    """Raise ValueError unless ``validation`` is None, a fraction of at least 0 and below 1, or a column of ``df``."""
    if validation is None:
        return
    if isinstance(validation, str):
        if df is not None and validation not in df.columns:
            raise ValueError(f"validation names {validation!r}, which the DataFrame does not have")
    elif isinstance(validation, bool) or not isinstance(validation, Real) or not 0 <= float(validation) < 1:
        raise ValueError(
            f"validation is {validation!r}, but must be a fraction of at least 0 and below 1, or the name of a column"
        )


def to_list(var: Any, length: int) -> list[Any] | None:
    """``var`` as a list of ``length``; a single value is repeated. Raises ValueError for another length."""
    if var is None:
        return None
    found = list(var) if isinstance(var, list | tuple) else [var]
    if len(found) not in (1, length):
        raise ValueError(f"there are {len(found)} values, but there must be one, or {length}")
    return found * length if len(found) == 1 else found
