"""Modules that a Trainer trains: whose package they are of, and those for plain models of torch."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from hvd_cluster.spark.estimators.columns import key_of
from hvd_cluster.spark.torch.batches import (
    BatchLayout,
    CombinedLoss,
    check_batch_norm,
    fitted_outputs,
    metric_groups,
    metric_values,
)
from hvd_cluster.spark.torch.learning_rates import multiplied

if TYPE_CHECKING:

    class LightningModule(torch.nn.Module):
        """The methods of Lightning's class that the class here uses."""

        def log(self, name: str, value: Any, **options: Any) -> None: ...

else:
    LightningModule = object

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
"""The packages of Lightning, and their modules with the Trainer."""

AVERAGING = "StochasticWeightAveraging"
FINETUNING = "BaseFinetuning"


def lightning_base(kind: type[Any], name: str = "LightningModule") -> type[Any] | None:
    """The class ``name`` of Lightning that ``kind`` is a subclass of; None if it is none."""
    for base in kind.__mro__:
        if base.__name__ == name and base.__module__.partition(".")[0] in PACKAGES:
            return base
    return None


def package_of(base: type[Any]) -> str:
    """The package of a class of Lightning."""
    return base.__module__.partition(".")[0]


def installed_package() -> str:
    """The package for models that are of none. Raises ImportError where there is none."""
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            return name
    raise ImportError('the LightningEstimator needs Lightning: pip install "hvd-cluster[lightning]"')


def package_for(model: torch.nn.Module) -> str:
    """The package whose Trainer trains ``model``."""
    base = lightning_base(type(model))
    return installed_package() if base is None else package_of(base)


def overrides(model: Any, base: type[Any], method: str) -> bool:
    """Whether ``model`` has a ``method`` of its own, instead of that of ``base``."""
    return method in vars(model) or getattr(type(model), method, None) is not getattr(base, method, None)


def check_module(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a LightningModule does not fit the parameters."""
    base = lightning_base(type(model))
    assert base is not None
    name = type(model).__name__
    for parameter in ("optimizer", "loss", "loss_weights", "metrics"):
        if settings[parameter]:
            raise ValueError(
                f"{parameter} is given, but {name} is a LightningModule, whose configure_optimizers, training_step and "
                "log say that; leave it out"
            )
    for method in ("training_step", "configure_optimizers"):
        if not overrides(model, base, method):
            raise ValueError(f"{name} has no {method}; define it in the LightningModule")
    if settings["validation"] and not overrides(model, base, "validation_step"):
        raise ValueError(
            f"validation is {settings['validation']!r}, but {name} has no validation_step, which would see these rows; "
            "define one, or leave validation out"
        )


def check_callbacks(callbacks: Sequence[Any], package: str) -> None:
    """Raise ValueError for a callback that is none of ``package``."""
    for callback in callbacks:
        base = lightning_base(type(callback), "Callback")
        if base is None or package_of(base) != package:
            raise ValueError(
                f"callbacks has {callback!r}, but must have objects of a subclass of {PACKAGES[package]}.Callback only"
            )


def check_sharded(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where workers could not share the steps of ``model``, or its parameters, as ``sharded`` says."""
    if not settings["sharded"]:
        return
    check_equal_steps(model, settings, "sharded")
    swaps = [each for each in settings["callbacks"] if lightning_base(type(each), "WeightAveraging") is not None]
    if swaps and settings["sharded"] != "rank":
        raise ValueError(
            f"sharded is {settings['sharded']!r}, but the callback {type(swaps[0]).__name__} exchanges parameters with "
            'their averages, once in each worker that shares them; give sharded="rank"'
        )


def check_elastic(model: Any, settings: Mapping[str, Any]) -> None:
    """Raise ValueError where a fit of ``model`` could not go on when workers come or go."""
    name = "min_num_proc" if settings["min_num_proc"] is not None else "max_num_proc"
    check_equal_steps(model, settings, name)
    for callback in settings["callbacks"]:
        if any(lightning_base(type(callback), base) is not None for base in ("WeightAveraging", AVERAGING, FINETUNING)):
            raise ValueError(
                f"{name} is given, but a worker that comes later cannot have the averages, or the parameters, that the "
                f"callback {type(callback).__name__} has added meanwhile; leave out {name}, or the callback"
            )


def check_equal_steps(model: Any, settings: Mapping[str, Any], name: str) -> None:
    """Raise ValueError where workers could not take equally many steps, as the parameter ``name`` needs it."""
    if not getattr(model, "automatic_optimization", True):
        raise ValueError(
            f"{name} is given, but {type(model).__name__} has manual optimization: a worker with fewer rows does not "
            f"know which steps the others make; let the module have automatic optimization, or leave out {name}"
        )
    check_batch_norm(model, bool((settings["trainer_args"] or {}).get("sync_batchnorm")), name)


def check_max_steps(settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a limit of steps beside a validation, which some workers would begin and others not."""
    if "max_steps" in (settings["trainer_args"] or {}) and settings["validation"] is not None:
        raise ValueError(
            "trainer_args has 'max_steps', and there is a validation, which comes after whole epochs; give "
            "train_steps_per_epoch and epochs"
        )


def check_averaging(model: torch.nn.Module, callbacks: Sequence[Any]) -> None:
    """Raise ValueError where Lightning cannot average the weights of ``model``."""
    averages = any(lightning_base(type(callback), AVERAGING) is not None for callback in callbacks)
    if averages and any(isinstance(each, torch.nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        raise ValueError(
            f"callbacks has a {AVERAGING}, but {type(model).__name__} has layers of batch norm, for which it would "
            "have to know the number of batches at the start; use another norm, such as LayerNorm, or an "
            "EMAWeightAveraging"
        )


def scale_averaging(callbacks: Iterable[Any], factor: float) -> None:
    """Multiply the rates to which a ``StochasticWeightAveraging`` among the ``callbacks`` goes."""
    for callback in callbacks:
        if lightning_base(type(callback), AVERAGING) is not None:
            callback._swa_lrs = multiplied(callback._swa_lrs, factor)


OWN_ARGUMENTS = {
    "strategy": "leave it out, the strategy is always horovod",
    "devices": "give num_proc, the number of workers, each with one device",
    "num_nodes": "give num_proc, the number of workers",
    "accelerator": "give use_gpu",
    "max_epochs": "give epochs",
    "callbacks": "give the parameter callbacks",
    "limit_train_batches": "give train_steps_per_epoch",
    "limit_val_batches": "give validation_steps_per_epoch",
    "val_check_interval": "leave it out, the validation comes after each epoch; check_val_every_n_epoch works",
    "max_time": "give epochs, or an EarlyStopping",
    "enable_checkpointing": "give a store, which gets a checkpoint after each epoch",
    "use_distributed_sampler": "leave it out, each worker has its own rows",
    "reload_dataloaders_every_n_epochs": "leave it out, each epoch has its own random order",
    "overfit_batches": "give train_steps_per_epoch",
    "fast_dev_run": "give train_steps_per_epoch and epochs",
    "barebones": "leave it out",
    "num_sanity_val_steps": "leave it out, the validation comes after each epoch",
}
"""Arguments of the Trainer that the estimator decides about, and what to do instead."""


def check_trainer_arguments(arguments: Mapping[str, Any], package: str) -> None:
    """Raise ValueError for arguments that the Trainer of ``package`` does not have, or that are not the user's."""
    for name in arguments:
        if name in OWN_ARGUMENTS:
            raise ValueError(f"trainer_args has {name!r}; {OWN_ARGUMENTS[name]}")
    if not arguments:
        return
    known = inspect.signature(import_module(PACKAGES[package]).Trainer.__init__).parameters
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "; leave it out"
            raise ValueError(f"trainer_args has {name!r}, which the Trainer of {package} does not have{hint}")


class SupervisedModule(LightningModule):
    """A model of torch with an optimizer and losses; the base of a package of Lightning is added when it is made."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        layout: BatchLayout,
        losses: Sequence[Callable[..., torch.Tensor]],
        loss_weights: Sequence[float] | None,
        metrics: Sequence[Any],
    ) -> None:
        super().__init__()
        self.model = model
        self.losses = torch.nn.ModuleList([each for each in losses if isinstance(each, torch.nn.Module)])
        self.optimizer = optimizer
        self._layout = layout
        self._combined = CombinedLoss(losses, loss_weights, layout.weight is not None)
        self._groups = metric_groups(metrics, len(layout.labels))

    def training_step(self, batch: Mapping[Any, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a batch, whose metrics are logged."""
        layout = self._layout
        outputs, labels = fitted_outputs(
            self.model(*(batch[key_of(name)] for name in layout.features)),
            [batch[key_of(name)] for name in layout.labels],
        )
        for (group, output), value in metric_values(self._groups, outputs, labels).items():
            self.log(metric_name(group, output), value, on_step=False, on_epoch=True)
        return self._combined(outputs, labels, batch[layout.weight] if layout.weight else None)

    def validation_step(self, batch: Mapping[Any, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The same for rows that are kept apart."""
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the user."""
        return self.optimizer


def metric_name(group: int, output: int) -> str:
    """The name of a metric of a plain model: the number of its group, and that of the output."""
    return f"metric_{group}_{output}"


def supervised(package: str, *arguments: Any) -> Any:
    """A :class:`SupervisedModule` for the Trainer of ``package``."""
    base = import_module(PACKAGES[package]).LightningModule
    return type("SupervisedModule", (SupervisedModule, base), {})(*arguments)
