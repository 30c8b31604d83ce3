"""The estimator for Lightning, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from collectives import override
from hvd_cluster.spark.estimators.columns import FitColumns
from hvd_cluster.spark.estimators.params import (
    SHARDED,
    EstimatorParameter,
    ineffective,
    refused,
    shapes,
    whole,
    with_parameters,
)
from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.lightning.batches import NamedLayout
from hvd_cluster.spark.lightning.modules import (
    check_averaging,
    check_callbacks,
    check_elastic,
    check_max_steps,
    check_module,
    check_sharded,
    check_trainer_arguments,
    lightning_base,
    overrides,
    package_for,
)
from hvd_cluster.spark.lightning.training import LightningFit, train
from hvd_cluster.spark.torch.batches import for_each_label, metric_groups, unreduced
from hvd_cluster.spark.torch.estimator import TorchBasedEstimator, layout_of, optimizer_in
from hvd_cluster.spark.torch.model import TorchModel
from hvd_cluster.spark.torch.payload import packed

__all__ = ["LightningEstimator", "LightningModel"]

MIN_PL_VERSION = "2.5"
"""Horovod's name for the oldest version of Lightning that works."""


def keywords(name: str, value: Any) -> dict[str, Any]:
    """A dictionary of arguments."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{name} is {value!r}, but must be a dictionary of arguments by their names")
    return dict(value)


def gpus(name: str, value: Any) -> int:
    """The number of GPUs of a worker."""
    if value not in (0, 1):
        raise ValueError(f"{name} is {value!r}, but a worker has one GPU or none: give 1 or 0, and more workers")
    return int(value)


NUM_GPUS = ("NumGPUs",)
LOCAL_BATCHES = "batches come from files of the worker, without a queue and its threads"

OWN = (
    EstimatorParameter("input_shapes", "the shape of each input, with -1 for the rows", None, shapes),
    EstimatorParameter("trainer_args", "more arguments of the Trainer", None, keywords),
    EstimatorParameter("logger", "a logger of Lightning; None: none", None),
    EstimatorParameter("log_every_n_steps", "how often the logger gets the values of steps", 50, whole(1)),
    EstimatorParameter("profiler", "a profiler of Lightning, or its name", None),
    EstimatorParameter(
        "num_gpus", "GPUs of a worker, 0 or 1; None: as use_gpu says", None, gpus, accessors=("NumGPUs",)
    ),
    SHARDED,
    ineffective("loader_num_epochs", None, "each row is seen once in an epoch; epochs says how often"),
    ineffective("debug_data_loader", False, LOCAL_BATCHES),
    ineffective("train_async_data_loader_queue_size", None, LOCAL_BATCHES),
    ineffective("val_async_data_loader_queue_size", None, LOCAL_BATCHES),
    refused("loss_constructors", "make the losses in the LightningModule, or give loss with a model of torch"),
    refused("train_minibatch_fn", "write training_step of a LightningModule, or use the TorchEstimator"),
)


class LightningModel(TorchModel):
    """A trained LightningModule, or a trained model of torch. Parameters and ``transform`` are those of a TorchModel.

    ``transform`` calls ``forward`` of the module, without a Trainer.
    """

    @override
    def _payload(self) -> bytes:
        """Raises ValueError where the module has no ``forward``."""
        model: Any = self.getModel()
        base = lightning_base(type(model))
        if base is not None and not overrides(model, base, "forward"):
            raise ValueError(
                f"{type(model).__name__} has no forward, which transform calls with the features; define it in the "
                "LightningModule"
            )
        return super()._payload()


@with_parameters(*OWN)
class LightningEstimator(TorchBasedEstimator):
    """Fits a LightningModule to the rows of a DataFrame; :meth:`fit` returns a :class:`LightningModel`.

    ::

        class Regression(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(28, 1)

            def forward(self, features):
                return self.layer(features).squeeze(1)

            def training_step(self, batch, batch_idx):
                return torch.nn.functional.mse_loss(self(batch["features"]), batch["y"])

            validation_step = training_step

            def configure_optimizers(self):
                return torch.optim.Adam(self.parameters(), lr=1e-3)

        estimator = LightningEstimator(
            num_proc=4, model=Regression(), feature_cols=["features"], label_cols=["y"], validation=0.1, epochs=5
        )
        fitted = estimator.fit(df).setOutputCols(["prediction"])
        fitted.transform(other).show()

    The package of the module's base class trains it: ``lightning`` or ``pytorch_lightning``. A model of torch with
    ``optimizer`` and ``loss`` becomes such a module. docs/spark-estimators.md has all parameters. Learning rates are
    multiplied by the number of workers in the training, because a step uses as many batches.
    """

    RUN_PREFIX = "lightning"
    MODEL = LightningModel

    @override
    def _check(self, settings: Mapping[str, Any]) -> None:
        model = settings["model"]
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model is {model!r}, but must be a LightningModule, or a torch.nn.Module with a loss")
        if lightning_base(type(model)) is not None:
            check_module(model, settings)
        else:
            _check_plain(settings)
        package = package_for(model)
        check_callbacks(settings["callbacks"], package)
        check_averaging(model, settings["callbacks"])
        check_max_steps(settings)
        check_trainer_arguments(settings["trainer_args"] or {}, package)
        if settings["min_num_proc"] is settings["max_num_proc"] is None:
            check_sharded(model, settings)
        else:
            check_elastic(model, settings)

    @override
    def _training(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        labels = len(columns.labels)
        if settings["loss"] is not None:
            losses = for_each_label(settings["loss"], labels, "loss")
            for loss in losses if columns.weight is not None else ():
                unreduced(loss)
        metric_groups(settings["metrics"], labels)
        return train, (packed(_fit_of(settings, columns, run, elastic)),)


def _check_plain(settings: Mapping[str, Any]) -> None:
    """Raise ValueError where there is no optimizer or no loss for a model of torch."""
    name = type(settings["model"]).__name__
    if not isinstance(settings["optimizer"], torch.optim.Optimizer):
        raise ValueError(
            f"optimizer is {settings['optimizer']!r}, but {name} is no LightningModule, so it must be a "
            "torch.optim.Optimizer over model.parameters(); or give a LightningModule, which has configure_optimizers"
        )
    if settings["loss"] is None:
        raise ValueError(
            f"there is no loss, but {name} is no LightningModule; give a loss, or a LightningModule, which has a "
            "training_step"
        )


def _fit_of(settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool) -> LightningFit:
    arguments = {
        "logger": False if settings["logger"] is None else settings["logger"],
        "log_every_n_steps": settings["log_every_n_steps"],
        "profiler": settings["profiler"],
        **(settings["trainer_args"] or {}),
    }
    return LightningFit(
        settings["model"],
        package_for(settings["model"]),
        layout_of(settings, columns, NamedLayout),
        run,
        optimizer=optimizer_in(settings),
        arguments=arguments,
        elastic=elastic,
        **LightningFit.chosen({**settings, "use_gpu": settings["use_gpu"] and settings["num_gpus"] != 0}),
    )
