"""Where the workers of an estimator run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame

from collectives import override
from executors import check_integer
from executors.agents.spark import Session
from hvd_cluster import spark
from hvd_cluster.spark.estimators.progress import FitProgress, ProgressStream

__all__ = ["Backend", "EstimatorBackend", "SparkBackend", "default_num_proc"]

ROW_CALL = "run_on_dataframe"


def default_num_proc() -> int:
    """Spark's default parallelism, where the active session is a classic one. Raises ValueError with Spark Connect."""
    size = Session.active().default_size()
    if size is None:
        raise ValueError("num_proc must be given: only the server of Spark Connect knows how many tasks it can run")
    return size


class EstimatorBackend(ABC):
    """Runs a function on workers, which may be anywhere.

    A fit needs the rows there, too. A backend with a method ``run_on_dataframe``, such as :class:`SparkBackend`, brings
    them. For others Spark writes them to Parquet files in the store, which are removed at the end of the fit.
    """

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[Any]:
        """The values of ``fn(*args, **kwargs)`` by rank; ``env`` is added to the environment of the workers."""

    @abstractmethod
    def num_processes(self) -> int:
        """The number of workers."""


Backend = EstimatorBackend
"""Horovod's name."""


class SparkBackend(EstimatorBackend):
    """Workers in the executors of the active session.

    Args:
        num_proc: number of workers; None means Spark's default parallelism.
        env: variables to add to the environment of the workers.
        launch: other arguments of :func:`hvd_cluster.spark.run`, such as ``stdout`` and ``start_timeout``; for elastic
            fits also ``elastic_timeout`` and ``reset_limit``.
    """

    def __init__(self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **launch: Any) -> None:
        self._size = None if num_proc is None else check_integer(num_proc, "num_proc", 1)
        self._env = dict(env or {})
        self._launch = launch

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        show: Callable[[FitProgress], None] | None = None,
    ) -> list[Any]:
        """The values of ``fn(*args, **kwargs)`` by rank; ``show`` gets the progress of a fit.

        Raises what :func:`hvd_cluster.spark.run` raises.
        """
        return spark.run(fn, args, kwargs, self._size, env=self._variables(env), **self._shown(show))

    def run_on_dataframe(
        self,
        fn: Callable[..., Any],
        df: DataFrame,
        args: Sequence[Any] = (),
        env: Mapping[str, str] | None = None,
        show: Callable[[FitProgress], None] | None = None,
        **rows: Any,
    ) -> list[Any]:
        """The values of ``fn(shard, *args)`` by rank; ``show`` gets the progress of the fit.

        ``rows`` are the arguments of :func:`hvd_cluster.spark.run_on_dataframe` about the rows and about workers that
        come and go. Raises what that function raises.
        """
        launch = {**self._shown(show), **rows}
        return spark.run_on_dataframe(fn, df, args, num_proc=self._size, env=self._variables(env), **launch)

    @override
    def num_processes(self) -> int:
        """The number of workers."""
        return self._size or default_num_proc()

    def _shown(self, show: Callable[[FitProgress], None] | None) -> dict[str, Any]:
        if show is None:
            return self._launch
        return {**self._launch, "stdout": ProgressStream(self._launch.get("stdout"), show)}

    def _variables(self, env: Mapping[str, str] | None) -> dict[str, str]:
        return {**self._env, **(env or {})}


def chosen_backend(backend: Any, num_proc: int | None, verbose: int) -> Any:
    """The backend of a fit. Raises ValueError where both are given, or where ``backend`` is none."""
    if backend is None:
        return SparkBackend(num_proc, verbose=verbose)
    if num_proc is not None:
        raise ValueError(
            f"num_proc is {num_proc} and there is a backend, too; give the number to the backend, as in "
            f"SparkBackend(num_proc={num_proc})"
        )
    if not callable(getattr(backend, "run", None)):
        raise ValueError(
            f"backend is {backend!r}, but must have the methods run() and num_processes(), as a SparkBackend; or leave "
            "it out"
        )
    return backend
