"""The estimator for models of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from collectives import override
from hvd_cluster.spark.estimators.columns import FitColumns, check_shapes, check_strings, has_strings
from hvd_cluster.spark.estimators.estimator import FitPlan, HorovodEstimator
from hvd_cluster.spark.estimators.params import (
    PASSES,
    SHARDED,
    EstimatorParameter,
    called,
    listed,
    shapes,
    with_parameters,
)
from hvd_cluster.spark.estimators.run import RunFolder
from hvd_cluster.spark.rows.columns import Stack
from hvd_cluster.spark.torch.batches import BatchLayout, check_batch_norm, for_each_label, metric_groups, unreduced
from hvd_cluster.spark.torch.callbacks import FitCallback
from hvd_cluster.spark.torch.model import TORCH_BLOBS, TorchModel
from hvd_cluster.spark.torch.payload import optimizer_of, packed, unpacked
from hvd_cluster.spark.torch.training import TorchFit, train

__all__ = ["TorchEstimator"]

L = TypeVar("L", bound=BatchLayout)


OWN = (
    EstimatorParameter("input_shapes", "the shape of each input, with -1 for the rows", None, shapes),
    EstimatorParameter(
        "loss_constructors", "functions that make the losses in the worker, instead of loss", None, listed
    ),
    EstimatorParameter("train_minibatch_fn", "a function in place of the inner step", None, called),
    SHARDED,
    PASSES,
)


class TorchBasedEstimator(HorovodEstimator):
    """The common part of TorchEstimator and LightningEstimator: inputs, and the way from the states to the model."""

    BLOB_FORMATS = TORCH_BLOBS
    MODEL: ClassVar[type[TorchModel]] = TorchModel

    @override
    def _check_features(self, settings: Mapping[str, Any], stacks: Sequence[Stack]) -> None:
        check_strings(stacks, settings)
        check_input_shapes(settings["input_shapes"], stacks)

    @override
    def _fitted(self, plan: FitPlan, outcome: Any) -> Any:
        settings = plan.settings
        model, optimizer = unpacked(packed((settings["model"], optimizer_in(settings))))
        model.load_state_dict(outcome["model"])
        if optimizer is not None:
            optimizer.load_state_dict(outcome["optimizer"])
        return self.MODEL(
            history=outcome["history"],
            model=model,
            feature_columns=plan.columns.features,
            input_shapes=settings["input_shapes"],
            label_columns=plan.columns.labels,
            optimizer=optimizer,
            run_id=plan.run.run_id,
            _metadata=plan.metadata,
            loss=settings["loss"],
            loss_constructors=settings["loss_constructors"],
            transformation_fn=settings["transformation_fn"] if has_strings(plan.columns, plan.metadata) else None,
        )


@with_parameters(*OWN)
class TorchEstimator(TorchBasedEstimator):
    """Fits a model of torch to the rows of a DataFrame; :meth:`fit` returns a :class:`TorchModel`.

    ::

        model = torch.nn.Sequential(torch.nn.Linear(28, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        estimator = TorchEstimator(
            num_proc=4,
            model=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
            loss=torch.nn.functional.mse_loss,
            feature_cols=["features"],
            label_cols=["y"],
            validation=0.1,
            batch_size=256,
            epochs=5,
        )
        fitted = estimator.fit(df).setOutputCols(["prediction"])
        fitted.transform(other).show()

    docs/spark-estimators.md has all parameters. Learning rates are multiplied by the number of workers in the training,
    because a step uses as many batches; the result has those of the user.
    """

    RUN_PREFIX = "pytorch"

    @override
    def _check(self, settings: Mapping[str, Any]) -> None:
        model, optimizer = settings["model"], settings["optimizer"]
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"model is {model!r}, but must be a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizer is {optimizer!r}, but must be a torch.optim.Optimizer over model.parameters()")
        if isinstance(optimizer, torch.optim.LBFGS) and settings["train_minibatch_fn"] is None:
            raise ValueError(
                "LBFGS evaluates the model several times in a step; give a train_minibatch_fn that does so"
            )
        check_losses(settings)
        if settings["sharded"] and settings["min_num_proc"] is settings["max_num_proc"] is None:
            check_batch_norm(model)
        for callback in settings["callbacks"]:
            if not isinstance(callback, FitCallback):
                raise ValueError(f"callbacks has {callback!r}, but must have objects of a subclass of FitCallback only")

    @override
    def _training(
        self, settings: Mapping[str, Any], columns: FitColumns, run: RunFolder, elastic: bool
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        labels = len(columns.labels)
        for name in ("loss", "loss_constructors"):
            if settings[name] is not None:
                losses = for_each_label(settings[name], labels, name)
        metric_groups(settings["metrics"], labels)
        if columns.weight is not None and settings["loss"] is not None:
            for loss in losses:
                unreduced(loss)
        return train, (packed(_fit_of(settings, layout_of(settings, columns, BatchLayout), run, elastic)),)


def optimizer_in(settings: Mapping[str, Any]) -> torch.optim.Optimizer | None:
    """The optimizer over the parameters of the model; None where a LightningModule makes its own."""
    optimizer = settings["optimizer"]
    return None if optimizer is None else optimizer_of(optimizer, settings["model"])


def check_input_shapes(shapes: Sequence[Sequence[int]] | None, stacks: Sequence[Stack]) -> None:
    """Raise ValueError where the columns of the features cannot have these ``shapes``, which begin with -1."""
    if shapes is not None and len(shapes) != len(stacks):
        raise ValueError(
            f"input_shapes has {len(shapes)} shapes, but the feature columns make {len(stacks)} inputs; give one "
            "for each (columns in a list of feature_cols make one input, as in [['a', 'b']])"
        )
    for shape in shapes or ():
        if not shape or shape[0] != -1:
            raise ValueError(f"input_shapes has {shape}, but a shape must begin with -1, which stands for the rows")
    check_shapes("input_shapes", shapes and [shape[1:] for shape in shapes], stacks)


def check_losses(settings: Mapping[str, Any]) -> None:
    """Raise ValueError unless there is one of loss and loss_constructors."""
    given = [name for name in ("loss", "loss_constructors") if settings[name] is not None]
    if len(given) != 1:
        found = "both loss and loss_constructors are given" if given else "there is no loss"
        raise ValueError(f"{found}; give one of loss and loss_constructors")


def layout_of(settings: Mapping[str, Any], columns: FitColumns, kind: type[L]) -> L:
    """Which tensors of a batch are inputs and labels."""
    return kind(
        columns.features,
        columns.labels,
        columns.weight,
        settings["input_shapes"],
        settings["label_shapes"],
        settings["transformation_fn"],
    )


def _fit_of(settings: Mapping[str, Any], layout: BatchLayout, run: RunFolder, elastic: bool) -> TorchFit:
    return TorchFit(
        settings["model"],
        optimizer_of(settings["optimizer"], settings["model"]),
        layout,
        run,
        elastic=elastic,
        **TorchFit.chosen(settings),
    )
