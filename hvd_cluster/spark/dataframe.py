"""A function on several workers, which share the rows of a DataFrame."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

from pyspark.sql import DataFrame

from executors import Call, ElasticArguments, ResetLimit, resolve_limits
from hvd_cluster.spark.launch import SparkLaunch
from hvd_cluster.spark.rows.columns import ColumnNames
from hvd_cluster.spark.rows.feed import Rows

T = TypeVar("T")

COOLDOWN = (1, 60)
"""In seconds: a task whose worker crashed gets another one after twice the first number, then ever later."""


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
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    elastic_timeout: float | None = None,
    reset_limit: ResetLimit = None,
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

    With ``min_num_proc`` or ``max_num_proc`` workers come and go with the executors, as in
    :func:`hvd_cluster.spark.run_elastic`. The rows are in ``max_num_proc`` partitions, and ``shard`` is an
    :class:`ElasticShard`: all ranks know how far each partition is, so the successor of a lost worker goes on with its
    rows. "Workers that come and go" in docs/spark.md says which rows are seen once, twice or never.

    What a batch is:

    * Columns of numbers and booleans keep their dtype; decimals become float64, and may lose precision.
    * A single name of a column of scalars, such as ``"y"``, gives an array of shape (rows,). A list of names, even of
      one name, gives an array of shape (rows, columns), of the dtype that NumPy finds for all of them.
    * Columns of arrays, and of vectors of Spark ML, dense and sparse, are matrices; in a list they stand side by side
      with the other columns. A column must have the same number of elements in all rows. Vectors are float64.
    * Lists inside of the list make a tuple of arrays: ``feature_cols=[["a", "b"], "user"]`` gives a matrix for ``a``
      and ``b``, and beside it an array for ``user``, each of its own dtype; 256 arrays at most.
    * Columns of strings or of binary data make arrays of objects, ``str`` or ``bytes``; in ``shard.torch()`` lists, in
      ``shard.tf_data()`` tensors of strings. They are features only, and share no list with numbers.
    * Nulls are refused, NaN is not. Dates, timestamps and other types are refused: convert them to numbers first. To
      save the memory and time of float64, cast columns to float, and vectors with
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
            another, a warning gives the numbers of rows. Elastic jobs always distribute them.
        min_num_proc, max_num_proc, elastic_timeout, reset_limit: see :func:`hvd_cluster.spark.run_elastic`. The time in
            which Spark computes the rows counts as a wait for workers: raise ``elastic_timeout`` if it takes long.
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
    elastic = _elastic(ElasticArguments(min_num_proc, max_num_proc, reset_limit, elastic_timeout))
    return cast("list[T]", launch_on_rows(SparkLaunch.of(**launch), Call.of(fn, args, kwargs), df, rows, elastic))


LAUNCH_ARGUMENTS = frozenset(inspect.signature(SparkLaunch.of).parameters)
ROW_ARGUMENTS = frozenset(inspect.signature(Rows.of).parameters) - {"schema"}
"""The names of the arguments about the rows."""


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if ``function`` got an argument with an unknown name."""
    for name in given:
        if name not in known:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _elastic(arguments: ElasticArguments) -> ElasticArguments | None:
    """None for a job that is not elastic. Raises ValueError if it has arguments that only elastic jobs have."""
    if arguments.is_elastic:
        return replace(arguments, cooldown=COOLDOWN, has_discovery=True)
    resolve_limits(1, arguments)
    return None


def check_df(function: str, rows: Iterable[str]) -> None:
    """Raise TypeError if ``function`` got arguments about rows, but no DataFrame."""
    if names := ", ".join(rows):
        raise TypeError(f"{function}() got {names}, but no df with rows")


def named_rows(function: str, df: DataFrame, rows: Mapping[str, Any]) -> Rows:
    """The rows of ``df``, with arguments that ``function`` got by name. Raises TypeError, ValueError."""
    if "label_cols" not in rows:
        raise TypeError(f"{function}() got a df, but no label_cols, which say where its labels are")
    return rows_of(df, **rows)


def rows_of(df: DataFrame, *args: Any, **kwargs: Any) -> Rows:
    """The rows of ``df``, with the arguments of :meth:`.rows.Rows.of`. Raises TypeError, ValueError."""
    require_dataframe(df)
    return Rows.of(df.schema, *args, **kwargs)


def require_dataframe(df: object) -> None:
    """Raise TypeError unless ``df`` is a DataFrame of Spark."""
    if not isinstance(df, DataFrame):
        kind = type(df)
        raise TypeError(
            f"df is a {kind.__module__}.{kind.__qualname__}, but must be a DataFrame of Spark, as "
            "spark.createDataFrame() makes one"
        )


def launch_on_rows(
    launch: SparkLaunch, call: Call, df: DataFrame, rows: Rows, elastic: ElasticArguments | None = None
) -> list[Any]:
    """The values of ``call`` by rank; its function gets the shard before its arguments."""
    # Under our own names, because mapInArrow() fails if a name has a dot or a backtick.
    # They are assigned by position, because Spark ignores case in names.
    names = df.columns
    columns = df.toDF(*(f"c{position}" for position in range(len(names))))
    columns = columns.select(*(f"c{names.index(name)}" for name in rows.columns))
    if elastic is not None:
        return launch.run_elastic(replace(call, function=rows.on_elastic_shard(call.function)), elastic, columns, rows)
    return launch.run(replace(call, function=rows.on_shard(call.function)), columns, rows, rows.repartition)
