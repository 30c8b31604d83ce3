"""The training of a LightningEstimator in one worker."""

from __future__ import annotations

import functools
import inspect
import io
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import broadcast_object
from hvd_cluster.spark.estimators.history import BestEpoch
from hvd_cluster.spark.estimators.progress import ProgressReporter
from hvd_cluster.spark.estimators.run import RunFolder, unreadable
from hvd_cluster.spark.lightning.batches import NamedBatches, NamedLayout, ValidationBatches
from hvd_cluster.spark.lightning.fit_recorder import (
    OURS,
    FitRecord,
    FitRecorder,
    ValueExchange,
    in_package,
    monitor_of,
    scale_checkpoint,
)
from hvd_cluster.spark.lightning.logged_values import ValueRecorder
from hvd_cluster.spark.lightning.modules import PACKAGES, SupervisedModule, lightning_base, overrides, supervised
from hvd_cluster.spark.torch.batches import for_each_label
from hvd_cluster.spark.torch.learning_rates import scaled_rates
from hvd_cluster.spark.torch.payload import on_cpu, unpacked
from hvd_cluster.spark.torch.training import TorchSettings, rank_device

logger = logging.getLogger(__name__)


@dataclass
class LightningFit(TorchSettings):
    """The module and the settings of a fit, which travel to the workers; ``arguments`` are those of the Trainer."""

    model: torch.nn.Module
    package: str
    layout: NamedLayout
    run: RunFolder
    optimizer: torch.optim.Optimizer | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    elastic: bool = False


def train(shard: Any, payload: bytes) -> dict[str, Any] | None:
    """Train on the rows of ``shard``; on rank 0 the state of the model, and the history."""
    fit: LightningFit = unpacked(payload)
    basics.init()
    with tempfile.TemporaryDirectory(prefix="hvd-lightning-") as folder:
        return training_for(fit)(fit, shard, folder).run()


def tensors_in(states: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the ``states`` of a module."""
    return {name: value for name, value in states.items() if isinstance(value, torch.Tensor)}


def training_for(fit: LightningFit) -> type[LightningTraining]:
    """The class of the training."""
    if fit.elastic:
        from hvd_cluster.spark.lightning.elastic import ElasticLightningTraining

        return ElasticLightningTraining
    return LightningTraining


class LightningTraining:
    """A fit of a Trainer on one rank. ``folder`` is for files that are not needed after it."""

    EXCHANGE: type[ValueExchange] = ValueExchange
    exchange: ValueExchange

    def __init__(self, fit: LightningFit, shard: Any, folder: str) -> None:
        self.fit = fit
        self.shard = shard
        self.folder = folder
        if fit.seed is not None:
            import_module(PACKAGES[fit.package]).seed_everything(fit.seed + basics.rank(), verbose=False)
        self.device = rank_device(fit.use_gpu, fit.elastic)
        self.module = self._module()
        dtype = next((each.dtype for each in self.module.parameters() if each.is_floating_point()), torch.float32)
        self.batches = self._batches(dtype)
        self.validation = self._validation(shard.validation, dtype)
        checkpoint = checkpoint_of(self._checkpoint())
        if checkpoint is not None:
            self._check_model(checkpoint["state_dict"])
        self.resumed = None if checkpoint is None else self._resumable(checkpoint)
        self.record = FitRecord.of(fit.epochs, checkpoint and checkpoint[OURS], fit.elastic)
        if self.record.best.loss is not None and not self.record.best.states and checkpoint is not None:
            self.record.best.states = self._states_in(checkpoint)

    def _module(self) -> Any:
        """The LightningModule; a plain model is in one."""
        fit = self.fit
        if lightning_base(type(fit.model)) is not None:
            return fit.model
        losses = for_each_label(fit.losses, len(fit.layout.labels), "loss")
        arguments = fit.model, fit.optimizer, fit.layout, losses, fit.loss_weights, fit.metrics
        return supervised(fit.package, *arguments)

    def _batches(self, dtype: torch.dtype) -> NamedBatches:
        return NamedBatches(self.shard, self.fit.layout, dtype, self.fit.train_steps, together=bool(self.fit.sharded))

    def _checkpoint(self) -> bytes | None:
        """That of the run, on all ranks."""
        data = self.fit.run.read() if basics.rank() == 0 else None
        found: bytes | None = broadcast_object(data, 0, "lightning.run")
        return found

    def _validation(self, kept_apart: Any, dtype: torch.dtype) -> ValidationBatches | None:
        base = lightning_base(type(self.module))
        if kept_apart is None or base is None or not overrides(self.module, base, "validation_step"):
            return None
        shard = self.fit.validation_shard(kept_apart)
        return ValidationBatches(shard, self.fit.layout, dtype, self.fit.validation_steps)

    def _check_model(self, states: Mapping[str, Any]) -> None:
        """Raise ValueError where ``states``, of the checkpoint, are not those of this module."""
        shapes = {name: tuple(value.shape) for name, value in tensors_in(self.module.state_dict()).items()}
        earlier = {name: tuple(value.shape) for name, value in tensors_in(states).items()}
        differ = sorted(name for name in shapes | earlier if shapes.get(name) != earlier.get(name))
        if differ:
            name = differ[0]
            raise self.fit.run.of_another(
                f"{name} had the shape {earlier.get(name)}, and now it has {shapes.get(name)}"
            )

    def _resumable(self, checkpoint: dict[str, Any]) -> str:
        """The path of a file from which this rank goes on."""
        path = os.path.join(self.folder, "resumed.ckpt")
        own = dict(checkpoint)
        scale_checkpoint(own, basics.size())
        torch.save(own, path)
        return path

    def _states_in(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        states = checkpoint["state_dict"]
        if not isinstance(self.module, SupervisedModule):
            return {"model": states}
        prefix = "model."
        inner = {name.removeprefix(prefix): value for name, value in states.items() if name.startswith(prefix)}
        return {"model": inner, "optimizer": checkpoint["optimizer_states"][0]}

    def states(self) -> dict[str, Any]:
        """As they are in the result: on the CPU, with the learning rates of the user."""
        if not isinstance(self.module, SupervisedModule):
            return {"model": on_cpu(self.module.state_dict())}
        optimizer = on_cpu(self.module.optimizer.state_dict())
        return {
            "model": on_cpu(self.module.model.state_dict()),
            "optimizer": {**optimizer, "param_groups": scaled_rates(optimizer["param_groups"], 1 / basics.size())},
        }

    def run(self) -> dict[str, Any] | None:
        """All epochs; the outcome on rank 0."""
        from hvd_cluster.lightning.packages import installed_classes

        strategy = installed_classes()[self.fit.package].trainer
        skip_fillers(self.module, self.batches)
        with quiet(self.fit.verbose):
            trainer = self._trainer(strategy)
            options = {} if self.resumed is None else {"ckpt_path": self.resumed, **trusting(trainer)}
            trainer.fit(self.module, self.batches, self.validation, **options)
        return self._outcome() if basics.rank() == 0 else None

    def _outcome(self) -> dict[str, Any]:
        """Weights that a callback has set at the end, as averages of several epochs, are better than any epoch's."""
        record, best = self.record, self.record.best
        if best.states and not same_values(self.record.last_weights, self.module.parameters()):
            logger.info(
                "the fitted model has the weights that a callback has set at the end of the training, not those of "
                "epoch %d, which is the best one",
                best.epoch + 1,
            )
            best = BestEpoch(len(record.history) - 1)
        return {**(best.states or self.states()), "history": record.history, "best_epoch": best.epoch}

    def _trainer(self, strategy: Any) -> Any:
        fit = self.fit
        kind = counting(import_module(PACKAGES[fit.package]).Trainer, self.batches.most)
        return kind(
            **{
                "logger": False,
                "enable_progress_bar": False,
                "enable_model_summary": False,
                "default_root_dir": self.folder,
                **fit.arguments,
                "strategy": strategy(compression=fit.compression or hvd.Compression.none, sharded=fit.sharded),
                "accelerator": "cpu" if self.device.type == "cpu" else "gpu",
                "devices": 1,
                "max_epochs": self.record.epochs.end,
                "num_sanity_val_steps": 0,
                "callbacks": self._callbacks(),
            }
        )

    def _callbacks(self) -> list[Any]:
        fit, record = self.fit, self.record
        values, reporter = ValueRecorder(self.module), ProgressReporter(bool(fit.verbose))
        first = in_package(fit.package, self.EXCHANGE, "Callback")
        last = in_package(fit.package, FitRecorder, "Checkpoint")
        monitor, save = monitor_of(fit.callbacks), None if fit.run.store is None else self._save
        self.exchange = first(record, values, self.batches, reporter, fit.terminate_on_nan)
        return [
            self.exchange,
            *fit.callbacks,
            last(record, values, monitor, fit.measure, reporter, self.states, save),
        ]

    def _save(self, trainer: Any) -> None:
        """Write the checkpoint; all ranks call it."""
        path = os.path.join(self.folder, "last.ckpt")
        trainer.save_checkpoint(path)
        if basics.rank() == 0:
            with open(path, "rb") as file:
                self.fit.run.write(file.read(), self.record.history)


def same_values(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Whether all tensors are equal, on whatever device."""
    return all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(some, others, strict=True))


WRONG_ADVICE = (
    ".*sync_dist=True.*",  # the values of all ranks are combined
    ".*`srun` command is available.*",  # the processes are there already
    ".*have no `val_dataloader`.*",  # no rows are for validation
    ".*LeafSpec.*",  # Lightning calls an old function of torch
)
"""Warnings of Lightning that have no reason here."""


LOGGERS = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")


@contextmanager
def quiet(verbose: int) -> Iterator[None]:
    """Lightning says less inside, unless ``verbose`` is above 1."""
    loggers = [logging.getLogger(name) for name in LOGGERS]
    levels = [each.level for each in loggers]
    profilers = [logging.getLogger(f"{name}.profilers") for name in LOGGERS]  # the user has asked for their reports
    with warnings.catch_warnings():
        for advice in WRONG_ADVICE:
            warnings.filterwarnings("ignore", message=advice)
        try:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level if verbose > 1 else max(level, logging.WARNING))
            for each in profilers:
                each.setLevel(logging.INFO)
            yield
        finally:
            for each in profilers:
                each.setLevel(logging.NOTSET)
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)


def skip_fillers(module: Any, batches: NamedBatches) -> None:
    """Let ``module`` not see a batch that is no rows.

    It does not step then, because this rank joins the steps of the others, unless all ranks have the same batches.
    Where batches have a weight, the loss is multiplied by it.
    """
    see, step = module.training_step, module.optimizer_step

    @functools.wraps(see)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        if not batches.is_filler:
            return weighed(see(*args, **kwargs), batches.weight)
        return torch.zeros((), requires_grad=True) if module.automatic_optimization else None

    @functools.wraps(step)
    def optimizer_step(
        epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if batches.is_filler and not batches.together and optimizer_closure is not None:
            optimizer_closure()
        else:
            step(epoch, batch_idx, optimizer, optimizer_closure, *args, **kwargs)

    module.training_step, module.optimizer_step = training_step, optimizer_step


def weighed(output: Any, weight: float) -> Any:
    """What ``training_step`` has returned, with its loss times ``weight``."""
    if weight == 1 or output is None:
        return output
    return {**output, "loss": output["loss"] * weight} if isinstance(output, Mapping) else output * weight


def counting(trainer: type[Any], most: Callable[[], int]) -> type[Any]:
    """A subclass of Lightning's ``trainer`` that knows the number of steps before an epoch has ended, if it is asked.

    ``most`` gives the number of batches in an epoch.
    """

    def estimated_stepping_batches(self: Any) -> int:
        steps: int = math.ceil(most() / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return steps if self.max_steps == -1 else min(steps, self.max_steps)

    return type(trainer.__name__, (trainer,), {"estimated_stepping_batches": property(estimated_stepping_batches)})


def trusting(trainer: Any) -> dict[str, Any]:
    """The argument for ``fit`` to load a checkpoint with anything in it; older versions always do."""
    return {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}


def checkpoint_of(data: bytes | None) -> dict[str, Any] | None:
    """The checkpoint in ``data``, which runs code. Raises ValueError where another estimator wrote it."""
    if data is None:
        return None
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise unreadable("LightningEstimator", error) from error
    if not isinstance(found, dict) or OURS not in found:
        raise unreadable("LightningEstimator")
    return found
