"""A function on several workers, which share the rows of a DataFrame."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from pyspark.sql import DataFrame

from executors.call import Call
from hvd_cluster.spark.columns import ColumnNames
from hvd_cluster.spark.launch import Launch
from hvd_cluster.spark.rows import Rows

__all__ = ["ROW_ARGUMENTS", "check_names", "launch_on_rows", "rows_of", "run_on_dataframe"]

T = TypeVar("T")


def run_on_dataframe(
    fn: Callable[..., T],
    df: DataFrame,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    label_cols: ColumnNames,
    feature_cols: ColumnNames | None = None,
    batch_size: int = 32,
    validation: float | str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    sample_weight_col: str | None = None,
    repartition: bool = False,
    **launch: Any,
) -> list[T]:
    """Run ``fn(shard, *args, **kwargs)`` on workers in Spark's executors, each with its part of the rows of ``df``.

    ::

        def train(shard, rate):
            hvd.init()
            ...
            for epoch in range(10):
                for features, labels in shard.torch():
                    ...
                last = hvd.join()  # shards may have different numbers of batches
                hvd.broadcast_parameters(model.state_dict(), root_rank=last)

        run_on_dataframe(train, df, args=(0.1,), num_proc=4, label_cols="y", batch_size=256)

    The rows go from Spark's partitions straight into the workers, in Arrow batches and over the local disk; there is no
    copy elsewhere. As a rule ``df`` is repartitioned; it is taken as it is only in classic Spark, with ``num_proc``
    partitions, if its plan is not an adaptive one and can be a barrier stage. ``shard``, a :class:`Shard`, gives the
    batches of any number of epochs, as NumPy arrays or as tensors; each row comes once in an epoch, on one rank.

    What a batch is:

    * Columns of numbers and booleans keep their dtype; decimals become float64, and may lose precision.
    * A single name of a column of scalars, such as ``"y"``, gives an array of shape (rows,). A list of names, even of
      one name, gives an array of shape (rows, columns), of the dtype that NumPy finds for all of them.
    * Columns of arrays, and of vectors of Spark ML, dense and sparse, are matrices; in a list they stand side by side
      with the other columns. A column must have the same number of elements in all rows. Vectors are float64.
    * Lists inside of the list make a tuple of arrays: ``feature_cols=[["a", "b"], "user"]`` gives a matrix for ``a``
      and ``b``, and beside it an array for ``user``, each of its own dtype; 256 arrays at most.
    * Nulls are refused, NaN is not. Strings, binary data, dates, timestamps and other types are refused: convert them
      to numbers first. To save the memory and time of float64, cast columns to float, and vectors with
      ``vector_to_array(column, "float32")``.

    Args:
        fn: the function; it travels by cloudpickle, so it may be a lambda, a closure or a part of the main script.
        df: the rows, of classic Spark or of Spark Connect.
        args: positional arguments of ``fn`` after the shard.
        kwargs: its keyword arguments.
        label_cols: the column of the labels, or several.
        feature_cols: the columns of the features; None means a list of all columns but labels and ``validation``.
        batch_size: number of rows of each batch but the last.
        validation: a part of the rows, at least 0 and below 1, that is kept apart in ``shard.validation``: random
            rows, which depend on ``seed`` and their places in the partitions, so that other partitions give other
            rows. Or a column, boolean or integer, that is above 0 for these rows.
        shuffle: whether each epoch has its own random order; see :class:`Shard`.
        seed: an integer of at least 0, which determines that order.
        sample_weight_col: a column of numbers, one for each row; batches then have it in third place:
            ``for features, labels, weights in shard``; None for batches of features and labels.
        repartition: whether Spark distributes the rows evenly even where the DataFrame has ``num_proc`` partitions.
            Without it such partitions may be used as shards unchanged; if one has more than 1.5 times the batches of
            another, a warning gives the numbers of rows.
        launch: the other arguments of :func:`run`, such as ``num_proc``, by name.

    Raises:
        ValueError: an argument has a value that is not allowed, or names a column that does not exist, exists several
            times, or has a type that cannot be used; nothing was started. Or a row has nulls, or arrays of another
            size than other rows.
        TypeError: ``df`` is no DataFrame of Spark, or there is no argument of that name; nothing was started.
        ExecutorError: the disk of a worker has no room for its rows; or what :func:`run` says.
        Exception: what :func:`run` raises otherwise.
    """
    check_names("run_on_dataframe", launch, LAUNCH_ARGUMENTS)
    rows = rows_of(df, label_cols, feature_cols, batch_size, validation, shuffle, seed, sample_weight_col, repartition)
    return cast("list[T]", launch_on_rows(Launch.of(**launch), Call.of(fn, args, kwargs), df, rows))


LAUNCH_ARGUMENTS = frozenset(inspect.signature(Launch.of).parameters)
ROW_ARGUMENTS = frozenset(
    name for name, each in inspect.signature(run_on_dataframe).parameters.items() if each.kind is each.KEYWORD_ONLY
)
"""The names of the arguments about the rows."""


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if ``function`` got an argument with an unknown name."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def rows_of(df: DataFrame, *args: Any, **kwargs: Any) -> Rows:
    """The rows of ``df``, with the arguments of :meth:`.rows.Rows.of`. Raises TypeError, ValueError."""
    if not isinstance(df, DataFrame):
        kind = type(df)
        raise TypeError(
            f"df is a {kind.__module__}.{kind.__qualname__}, but must be a DataFrame of Spark, as "
            "spark.createDataFrame() makes one"
        )
    return Rows.of(df.schema, *args, **kwargs)


def launch_on_rows(launch: Launch, call: Call, df: DataFrame, rows: Rows) -> list[Any]:
    """The values of ``call`` by rank; its function gets the shard before its arguments."""
    # Under our own names, because mapInArrow() fails if a name has a dot or a backtick.
    # They are assigned by position, because Spark ignores case in names.
    names = df.columns
    columns = df.toDF(*(f"c{position}" for position in range(len(names))))
    columns = columns.select(*(f"c{names.index(name)}" for name in rows.columns))
    return launch.run(replace(call, function=rows.on_shard(call.function)), columns, rows, rows.repartition)
