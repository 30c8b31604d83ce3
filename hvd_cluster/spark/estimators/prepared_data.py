"""Rows that Spark writes to a store before a fit, for ``fit_on_parquet``: Horovod's ``horovod.spark.common.util``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

from pyspark.sql import DataFrame

from hvd_cluster.spark.dataframe import require_dataframe, rows_of
from hvd_cluster.spark.estimators.columns import quoted, with_boolean_validation
from hvd_cluster.spark.estimators.store import AbstractFilesystemStore

__all__ = ["check_validation", "prepare_data", "to_list"]

SEED = 0


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
    require_dataframe(df)
    check_validation(validation, df)
    marked = with_boolean_validation(df, validation)
    rows_of(marked, list(label_columns), list(feature_columns), 1, validation, sample_weight_col=sample_weight_col)
    number = next(each for each in itertools.count() if not store.exists(store.get_train_data_path(each)))
    paths = store.get_train_data_path(number), store.get_val_data_path(number)
    names = [*feature_columns, *label_columns, *([sample_weight_col] if sample_weight_col else [])]
    for part, path in zip(_parts(marked, validation), paths, strict=False):
        files = part.select(*map(quoted, names)).repartition(num_processes * partitions_per_process)
        files.write.parquet(store.get_full_path(path))
    yield number


def _parts(df: DataFrame, validation: float | str | None) -> list[DataFrame]:
    """The rows for training and, if there are any, those for validation."""
    if isinstance(validation, str):
        kept_apart = quoted(validation).cast("int") > 0
        return [df.where(~kept_apart), df.where(kept_apart)]
    return df.randomSplit([1 - validation, validation], SEED) if validation else [df]


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
