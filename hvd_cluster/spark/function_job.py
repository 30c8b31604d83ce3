"""A function on several workers, each beside a task of Spark: of one barrier stage, or elastic."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TextIO, TypeVar, cast

from pyspark.sql import DataFrame

from executors import Call, ElasticArguments, ResetLimit, renamed
from hvd_cluster.spark.dataframe import (
    COOLDOWN,
    ROW_ARGUMENTS,
    check_df,
    check_names,
    launch_on_rows,
    named_rows,
)
from hvd_cluster.spark.launch import SparkLaunch

__all__ = ["run", "run_elastic"]

T = TypeVar("T")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | os.PathLike[str] | None = None,
    *,
    dashboard: bool | str = False,
    df: DataFrame | None = None,
    **rows: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on ``num_proc`` workers in the executors of the active session; results by rank.

    All workers start at the same time, each beside a task of Spark, on ranks that follow the hosts. Their output
    appears here, each line after ``[rank]<stdout>:`` or ``[rank]<stderr>:``. The first worker that fails ends the
    others.

    Args:
        fn: the function; it travels by cloudpickle, so it may be a lambda, a closure or a part of the main script.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of workers; None means ``spark.default.parallelism``.
        start_timeout: seconds in which all workers must have come up; None means HOROVOD_SPARK_START_TIMEOUT, or else
            600. It does not count while Spark computes the rows. If they can never fit, the error comes at once.
        use_mpi: must not be true: there is no MPI here.
        use_gloo: must not be false.
        extra_mpi_args: must be left out.
        env: variables to add to the environment of the workers, which is that of their executor.
        stdout: a text stream for the output of the workers; None means this process's own. It never delays the
            workers: output that it does not take in time, or cannot take, is dropped with a warning.
        stderr: the same for their standard error.
        verbose: 2 to see on standard error which rank is on which host.
        nics: network interfaces that the workers use among themselves; None means any.
        prefix_output_with_timestamp: whether the time comes before each line.
        executable: the Python of the workers; None means that of Spark's tasks. It must be able to import hvd_cluster.
        dashboard: true for a live page of the job in the driver, whose link is printed; or its address and port, such
            as ``"0.0.0.0:8265"``. Executors must reach the driver.
        df: a DataFrame whose rows the workers share: the same as :func:`run_on_dataframe`.
        rows: arguments of :func:`run_on_dataframe` about the rows, such as ``label_cols``.

    Raises:
        ValueError: an argument has a value that is not allowed; nothing was started.
        TypeError: ``fn`` or an argument cannot be called or pickled, ``df`` is no DataFrame of Spark, or there is no
            argument of that name; nothing was started.
        PlacementError: the executors can never run so many tasks at once; nothing was started.
        StartTimeoutError: a worker did not come up in time.
        CommandNotFoundError: there is no ``executable`` beside a task.
        WorkerError: a worker or its executor died, or called ``sys.exit``, or its result cannot be pickled.
        ExecutorError: there is no active session, or Spark could not run the stage.
        Exception: an exception of ``fn``, as itself; its ``__cause__`` is a RemoteError with rank and traceback.
    """
    check_names("run", rows, ROW_ARGUMENTS)
    launch = SparkLaunch.of(
        num_proc,
        start_timeout,
        use_mpi,
        use_gloo,
        extra_mpi_args,
        env,
        stdout,
        stderr,
        verbose,
        nics,
        prefix_output_with_timestamp,
        executable,
        dashboard,
    )
    call = Call.of(fn, args, kwargs)
    if df is None:
        check_df("run", rows)
        return cast("list[T]", launch.run(call))
    return launch_on_rows(launch, call, df, named_rows("run", df, rows))


def run_elastic(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    start_timeout: float | None = None,
    elastic_timeout: float | None = None,
    reset_limit: ResetLimit = None,
    env: Mapping[str, str] | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    verbose: int = 1,
    nics: Iterable[str] | str | None = None,
    prefix_output_with_timestamp: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    executable: str | os.PathLike[str] | None = None,
    dashboard: bool | str = False,
    df: DataFrame | None = None,
    **rows: Any,
) -> list[T]:
    """Run ``fn(*args, **kwargs)`` on workers that come and go with the executors of the active session.

    ``fn`` calls a function that :func:`hvd_cluster.torch.elastic.run` decorates. The job starts when ``num_proc`` tasks
    of Spark run. It goes on as long as ``min_num_proc`` do, and grows to ``max_num_proc`` when there are more slots,
    such as those of dynamic allocation. Spark starts a lost task again, up to ``spark.task.maxFailures`` times; its
    worker is a newcomer. When Spark decommissions an executor, its workers hand over first. The results are those of
    the workers in the world in which the first one returned, by rank.

    Args:
        fn: the function, see :func:`run`.
        args: its positional arguments.
        kwargs: its keyword arguments.
        num_proc: number of workers at the start; None means ``min_num_proc``, or else ``spark.default.parallelism``.
        min_num_proc: the fewest workers to go on with; None means ``num_proc``.
        max_num_proc: the most workers; None means ``num_proc``.
        start_timeout: seconds in which a worker must come up; None means HOROVOD_SPARK_START_TIMEOUT, or else 600.
        elastic_timeout: seconds to wait for enough workers; None means HOROVOD_ELASTIC_TIMEOUT, or else 600.
        reset_limit: the most losses and resizes together, or of each, as {"failures": 3, "resizes": 10}; None means any
            number.
        env, stdout, stderr, verbose, nics, prefix_output_with_timestamp, executable, dashboard: see :func:`run`.
        min_np: old name of ``min_num_proc``.
        max_np: old name of ``max_num_proc``.
        df: a DataFrame whose rows the workers share: the same as :func:`run_on_dataframe` with these numbers.
        rows: arguments of :func:`run_on_dataframe` about the rows, such as ``label_cols``.

    Raises:
        ValueError, TypeError: as :func:`run`; nothing was started.
        WorkerError: too many workers were lost for the job to go on.
        ExecutorError: there is no active session, too few workers were there for too long, or Spark ended the stage.
        Exception: an exception of ``fn``, as itself; its ``__cause__`` is a RemoteError with rank and traceback.
    """
    check_names("run_elastic", rows, ROW_ARGUMENTS)
    launch = SparkLaunch.of(
        num_proc,
        start_timeout,
        env=env,
        stdout=stdout,
        stderr=stderr,
        verbose=verbose,
        nics=nics,
        prefix_output_with_timestamp=prefix_output_with_timestamp,
        executable=executable,
        dashboard=dashboard,
    )
    least = renamed("min_num_proc", min_num_proc, "min_np", min_np)
    most = renamed("max_num_proc", max_num_proc, "max_np", max_np)
    arguments = ElasticArguments(least, most, reset_limit, elastic_timeout, COOLDOWN, has_discovery=True)
    call = Call.of(fn, args, kwargs)
    if df is None:
        check_df("run_elastic", rows)
        return cast("list[T]", launch.run_elastic(call, arguments))
    return launch_on_rows(launch, call, df, named_rows("run_elastic", df, rows), arguments)
