"""How workers are launched in Spark: the arguments that all launching functions have in common."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex, TextIO

from executors import (
    Address,
    Call,
    ElasticArguments,
    Output,
    check_integer,
    check_variables,
    interface_names,
    refuse_mpi,
    resolve_grace,
    resolve_limits,
    resolve_seconds,
)
from executors.agents.spark import (
    Feeder,
    PickledCall,
    Session,
    SparkOptions,
    run_elastic_on_spark,
    run_on_spark,
)
from hvd_cluster import horovod, numpy_for_mxnet
from hvd_cluster.spark.rows.partitions import divided, repeatable

START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
START_TIMEOUT_SECONDS = 600.0
numpy_for_mxnet.register()


@dataclass(frozen=True, slots=True)
class SparkLaunch:
    """The arguments of :func:`hvd_cluster.spark.run` that are not about the function; checked by :meth:`of`."""

    num_proc: int | None
    stdout: TextIO | None
    stderr: TextIO | None
    timestamp: bool
    options: SparkOptions

    @classmethod
    def of(
        cls,
        num_proc: SupportsIndex | None = None,
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
        dashboard: bool | str = False,
    ) -> SparkLaunch:
        """From the arguments as they are given. Raises ValueError."""
        refuse_mpi(use_mpi, use_gloo, extra_mpi_args, "extra_mpi_args")
        size = None if num_proc is None else check_integer(num_proc, "num_proc", 1)
        options = SparkOptions(
            start_timeout=resolve_seconds(start_timeout, "start_timeout", START_TIMEOUT, START_TIMEOUT_SECONDS),
            environment=check_variables(env, "env", "run()"),
            nics=interface_names(nics),
            executable=None if executable is None else os.fspath(executable),
            search_path=horovod.search_path if horovod.is_requested() else None,
            grace=resolve_grace(),
            verbose=verbose > 1,
            dashboard=Address.of(dashboard),
        )
        for name, stream in (("stdout", stdout), ("stderr", stderr)):
            _check_stream(name, stream)
        return cls(size, stdout, stderr, prefix_output_with_timestamp, options)

    def run(self, call: Call, df: Any = None, feeder: Feeder | None = None, repartition: bool = False) -> list[Any]:
        """The values of ``call`` by rank, from workers beside the partitions of ``df``, which ``feeder`` feeds.

        Without a ``df`` the workers are in the active session. ``repartition`` distributes the rows of ``df`` in any
        case. Raises the errors of :func:`hvd_cluster.spark.run`.
        """
        pickled = PickledCall.of(call)
        session = Session.active() if df is None else Session(df.sparkSession)
        size = self.num_proc or _default_size(session)
        session.check_slots(size, self.options.start_timeout)
        frame = session.spark.range(0, size, 1, size) if df is None else divided(session, df, size, repartition)
        output = Output(size, None, self.timestamp, self.stdout, self.stderr)
        return run_on_spark(session, frame, size, pickled, output, replace(self.options, feeder=feeder))

    def run_elastic(
        self, call: Call, arguments: ElasticArguments, df: Any = None, feeder: Feeder | None = None
    ) -> list[Any]:
        """The values of ``call`` by rank, from workers that come and go with the executors of the session.

        With ``df`` they are beside its rows, and ``feeder`` feeds them. Raises the errors of
        :func:`hvd_cluster.spark.run_elastic`.
        """
        pickled = PickledCall.of(call)
        session = Session.active() if df is None else Session(df.sparkSession)
        size = self.num_proc or _elastic_size(session, arguments)
        limits = resolve_limits(size, replace(arguments, most=size if arguments.most is None else arguments.most))
        most = limits.most
        frame = session.spark.range(0, most, 1, most) if df is None else repeatable(df, most)
        output = Output(most, None, self.timestamp, self.stdout, self.stderr)
        return run_elastic_on_spark(session, frame, pickled, limits, output, replace(self.options, feeder=feeder))


def _check_stream(name: str, stream: Any) -> None:
    try:
        if stream is not None:
            stream.write("")
            stream.flush()
    except Exception as error:
        raise ValueError(
            f"{name} is {stream!r}, but must be a text stream that can be written, such as sys.stderr or open(path, "
            f"'w') ({error})"
        ) from error


def _elastic_size(session: Session, arguments: ElasticArguments) -> int:
    """Spark's default parallelism within the limits; the upper one where only the server of Spark Connect knows it."""
    least, most = (each if isinstance(each, int) else None for each in (arguments.least, arguments.most))
    size = session.default_size() or most or least or _default_size(session)
    return max(least or 1, min(size, most or size))


def _default_size(session: Session) -> int:
    size = session.default_size()
    if size is None:
        raise ValueError(
            "num_proc must be given: only the server of Spark Connect knows how many tasks its executors can run"
        )
    return size
