"""The way of a fit that all estimators have in common."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.ml import Estimator
from pyspark.sql import DataFrame

from collectives import override
from hvd_cluster.spark.dataframe import rows_of
from hvd_cluster.spark.estimators import progress
from hvd_cluster.spark.estimators.backend import chosen_backend
from hvd_cluster.spark.estimators.checkpoints import RunFolder
from hvd_cluster.spark.estimators.columns import (
    FitColumns,
    check_labels,
    check_shapes,
    metadata_of,
    with_boolean_validation,
)
from hvd_cluster.spark.estimators.model import HorovodModel
from hvd_cluster.spark.estimators.params import EstimatorParams
from hvd_cluster.spark.estimators.persistence import Persistent
from hvd_cluster.spark.rows.columns import Stack

__all__ = ["HorovodEstimator", "HorovodModel"]

logger = logging.getLogger(__name__)


def check_steps(settings: Mapping[str, Any], elastic: bool) -> None:
    """Raise ValueError where the workers come and go, and the steps are limited."""
    if elastic and settings["train_steps_per_epoch"] is not None:
        raise ValueError(
            f"train_steps_per_epoch is {settings['train_steps_per_epoch']}, but workers that come and go see all rows "
            "in an epoch; leave it out, or give the fit a part of the rows, as with df.sample(0.1)"
        )


class HorovodEstimator(Estimator[Any], EstimatorParams, Persistent):
    """Fits a model on workers in the executors of Spark, which share the rows of a DataFrame.

    A subclass has what depends on the framework.
    """

    RUN_PREFIX = "run"

    @override
    def _fit(self, dataset: DataFrame) -> Any:
        settings = self.settings()
        self._check(settings)
        df = with_boolean_validation(dataset, settings["validation"])
        rows, columns, elastic = self._rows(df, settings)
        backend = chosen_backend(settings["backend"], settings["num_proc"], settings["verbose"])
        run = RunFolder.of(settings["store"], settings["run_id"], self.RUN_PREFIX)
        train, arguments = self._training(settings, columns, run, bool(elastic))
        run.check_writable({"features": columns.features, "labels": columns.labels, "epochs": settings["epochs"]})
        show = progress.display() if settings["verbose"] else None
        results = backend.run_on_dataframe(train, df, arguments, show=show, **rows, **elastic)
        return self._fitted(settings, columns, run, results[0], metadata_of(dataset, columns))

    def _rows(self, df: DataFrame, settings: Mapping[str, Any]) -> tuple[dict[str, Any], FitColumns, dict[str, Any]]:
        """The arguments about rows, the columns, and the arguments about workers that come and go."""
        columns = FitColumns.of(getattr(df, "schema", None), settings)
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

    def _check_features(self, settings: Mapping[str, Any], stacks: Sequence[Stack]) -> None:
        """Raise ValueError where the columns of the features do not fit the other parameters."""

    @abstractmethod
    def _training(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function for the workers, ``fn(shard, *arguments)``, and the arguments."""

    @abstractmethod
    def _fitted(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, outcome: Any, metadata: dict[str, Any]
    ) -> Any:
        """The model, from the ``outcome`` of rank 0."""
