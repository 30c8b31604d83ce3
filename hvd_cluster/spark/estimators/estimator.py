"""The way of a fit that all estimators have in common."""

from __future__ import annotations

import inspect
import posixpath
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from collectives import override
from executors.agents.spark import Session
from hvd_cluster.spark.dataframe import require_dataframe, rows_of
from hvd_cluster.spark.estimators import progress
from hvd_cluster.spark.estimators.backend import ROW_CALL, chosen_backend
from hvd_cluster.spark.estimators.columns import (
    FitColumns,
    check_labels,
    check_shapes,
    metadata_of,
    quoted,
    with_boolean_validation,
)
from hvd_cluster.spark.estimators.model import HorovodModel
from hvd_cluster.spark.estimators.params import EstimatorParams
from hvd_cluster.spark.estimators.parquet import ParquetRows
from hvd_cluster.spark.estimators.persistence import Persistent
from hvd_cluster.spark.estimators.progress import FitProgress
from hvd_cluster.spark.estimators.run import RunFolder, with_widths
from hvd_cluster.spark.rows.columns import Stack

__all__ = ["FitPlan", "HorovodEstimator", "HorovodModel"]


def check_steps(settings: Mapping[str, Any], elastic: bool) -> None:
    """Raise ValueError where the workers come and go, and the steps are limited."""
    if elastic and settings["train_steps_per_epoch"] is not None:
        raise ValueError(
            f"train_steps_per_epoch is {settings['train_steps_per_epoch']}, but workers that come and go see all rows "
            "in an epoch; leave it out, or give the fit a part of the rows, as with df.sample(0.1)"
        )


def shows_progress(method: Callable[..., Any]) -> bool:
    """Whether ``method`` of a backend takes ``show``, as those of a SparkBackend do."""
    return "show" in inspect.signature(method).parameters


@dataclass(frozen=True)
class FitResult:
    """The result of a fit: the outcome of rank 0, and how many values a row has in each input of the model."""

    outcome: Any
    input_widths: tuple[int, ...]

    @classmethod
    def of(cls, results: Sequence[Any]) -> FitResult:
        """From what :func:`with_widths` gave on each rank."""
        return cls(results[0][0], next((widths for _, widths in results if widths), ()))


@dataclass(frozen=True)
class FitPlan:
    """A fit, checked before anything starts.

    ``rows`` are arguments of ``run_on_dataframe`` about the rows, ``elastic`` those about workers that come and go. The
    workers call ``train(shard, *arguments)``, with ``environment`` added to theirs. ``show``, if it is given, gets the
    progress.
    """

    settings: Mapping[str, Any]
    columns: FitColumns
    metadata: dict[str, str]
    run: RunFolder
    backend: Any
    rows: Mapping[str, Any]
    elastic: Mapping[str, Any]
    train: Callable[..., Any]
    arguments: tuple[Any, ...]
    show: Callable[[FitProgress], None] | None
    environment: Mapping[str, str]

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, the folder of the run belongs to this fit, and says what the fit is about. Raises ValueError."""
        with self.run.taken():  # first, because the folder of a fit under way must stay as it is
            about = {"features": self.columns.features, "labels": self.columns.labels}
            self.run.check_writable({**about, "epochs": self.settings["epochs"]})
            yield

    def on_dataframe(self, df: DataFrame) -> FitResult:
        """The fit on workers that get the rows straight from Spark, if their backend can do that."""
        if callable(getattr(self.backend, ROW_CALL, None)):
            options = self._options_of(self.backend.run_on_dataframe)
            found = self.backend.run_on_dataframe(
                with_widths, df, (self.train, *self.arguments), **options, **self.rows, **self.elastic
            )
            return FitResult.of(found)
        self._refuse_elastic()
        store = self._store(f"the backend {self.backend!r} has no method {ROW_CALL}, so Spark writes the rows to files")
        path = posixpath.join(store.get_run_path(self.run.run_id), f"rows_{time.time_ns()}")
        rows = rows_of(df, **self.rows)
        try:
            df.select(*map(quoted, rows.columns)).write.parquet(store.get_full_path(path))
            return self.on_files(ParquetRows(store, path, rows))
        finally:
            with suppress(OSError):  # where the write has failed, its error counts
                store.fs.delete_dir(store.get_localized_path(path))

    def on_files(self, rows: ParquetRows) -> FitResult:
        """The fit on workers that read Parquet files. Raises ValueError for workers that come and go."""
        self._refuse_elastic()
        options = self._options_of(self.backend.run)
        found = self.backend.run(rows.on_shard(with_widths), args=(self.train, *self.arguments), **options)
        return FitResult.of(found)

    def _options_of(self, method: Callable[..., Any]) -> dict[str, Any]:
        variables = {"env": dict(self.environment)} if self.environment else {}
        return {**variables, "show": self.show} if shows_progress(method) else variables

    def _refuse_elastic(self) -> None:
        if self.elastic:
            raise ValueError(
                f"{next(iter(self.elastic))} is given, but workers that read rows from files cannot come and go; leave "
                "it out, or fit a DataFrame with a SparkBackend"
            )

    def _store(self, why: str) -> Any:
        store = self.settings["store"]
        if store is None:
            raise ValueError(f"{why}, but there is no store; give store=, as with Store.create(path)")
        return store


class HorovodEstimator(Estimator[Any], EstimatorParams, Persistent):
    """Fits a model on workers in the executors of Spark, which share the rows of a DataFrame.

    A subclass has what depends on the framework.
    """

    RUN_PREFIX = "run"

    def fit_on_parquet(self, params: dict[Any, Any] | None = None, dataset_idx: int | None = None) -> Any:
        """As ``fit``, with the Parquet files at ``store.get_train_data_path(dataset_idx)``; keeps no copy of the rows.

        Rows for validation are those that ``validation`` says, or else the files at ``store.get_val_data_path()``.
        Raises ValueError where there is no store, or no file.
        """
        estimator: HorovodEstimator = self.copy(params) if params else self
        return estimator._fit_on_parquet(dataset_idx)

    def _fit_on_parquet(self, dataset_idx: int | None) -> Any:
        store = self.getOrDefault("store")
        if store is None:
            raise ValueError("there is no store, which has the Parquet files; give store=, as with Store.create(path)")
        path, others = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
        if not store.is_parquet_dataset(path):
            raise ValueError(
                f"there are no Parquet files at {path}; write them, as with df.write.parquet(path), or call fit(df)"
            )
        df = Session.active().spark.read.parquet(store.get_full_path(path))
        plan = self._plan(df)
        has_others = plan.settings["validation"] is None and store.is_parquet_dataset(others)
        rows = rows_of(with_boolean_validation(df, plan.settings["validation"]), **plan.rows)
        with plan.taken():
            return self._finished(plan, plan.on_files(ParquetRows(store, path, rows, others if has_others else None)))

    @override
    def _fit(self, dataset: DataFrame) -> Any:
        plan = self._plan(dataset)
        df = with_boolean_validation(dataset, plan.settings["validation"])
        with plan.taken():
            return self._finished(plan, plan.on_dataframe(df))

    def _finished(self, plan: FitPlan, result: FitResult) -> HorovodModel:
        model: HorovodModel = self._fitted(plan, result.outcome)
        model._set(_input_widths=list(result.input_widths))
        return model._resetUid(self.uid)

    def _plan(self, dataset: DataFrame) -> FitPlan:
        """Raises ValueError, TypeError."""
        require_dataframe(dataset)
        settings = self.settings()
        self._check(settings)
        df = with_boolean_validation(dataset, settings["validation"])
        rows, columns, elastic = self._rows(df, settings)
        backend = chosen_backend(settings["backend"], settings["num_proc"], settings["verbose"])
        if not shows_progress(getattr(backend, ROW_CALL, backend.run)):
            settings = {**settings, "verbose": 0}  # or lines for the driver would stand in the output of a worker
        run = RunFolder.of(settings["store"], settings["run_id"], self.RUN_PREFIX)
        train, arguments = self._training(settings, columns, run, bool(elastic))
        show = progress.display() if settings["verbose"] else None
        metadata = metadata_of(dataset, columns)
        variables = self._environment(settings)
        return FitPlan(settings, columns, metadata, run, backend, rows, elastic, train, arguments, show, variables)

    def _rows(self, df: DataFrame, settings: Mapping[str, Any]) -> tuple[dict[str, Any], FitColumns, dict[str, Any]]:
        """The arguments about rows, the columns, and the arguments about workers that come and go."""
        columns = FitColumns.of(df.schema, settings)
        rows = {
            **columns.arguments(),
            **{name: settings[name] for name in ("batch_size", "validation", "shuffle")},
            "seed": settings["random_seed"] or 0,
        }
        selection = rows_of(df, **rows).selection  # raises what is wrong with the columns
        check_labels(columns.labels, settings)
        check_shapes("label_shapes", settings["label_shapes"], selection.labels)
        self._check_features(settings, selection.features)
        elastic = {name: settings[name] for name in ("min_num_proc", "max_num_proc") if settings[name] is not None}
        check_steps(settings, bool(elastic))
        return rows, columns, elastic

    @abstractmethod
    def _check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError for parameters that do not fit together."""

    def _environment(self, settings: Mapping[str, Any]) -> Mapping[str, str]:
        """Variables for the environment of the workers."""
        return {}

    def _check_features(self, settings: Mapping[str, Any], stacks: Sequence[Stack]) -> None:
        """Raise ValueError where the columns of the features do not fit the other parameters."""

    @abstractmethod
    def _training(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function for the workers, ``fn(shard, *arguments)``, and the arguments."""

    @abstractmethod
    def _fitted(self, plan: FitPlan, outcome: Any) -> Any:
        """The model, from the ``outcome`` of rank 0."""
