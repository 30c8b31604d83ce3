"""The callbacks of a fit: values of all ranks, the history, the best epoch, checkpoints, progress."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

import hvd_cluster.torch as hvd
from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster.spark.estimators.history import BestEpoch, require_finite
from hvd_cluster.spark.estimators.progress import ProgressReporter
from hvd_cluster.spark.estimators.run import EpochRange
from hvd_cluster.spark.lightning.batches import NamedBatches, checked_rows
from hvd_cluster.spark.lightning.logged_values import PhaseTotals, PhaseValues, ValueRecorder, loss_of, means_of
from hvd_cluster.spark.lightning.modules import PACKAGES, lightning_base, scale_averaging
from hvd_cluster.spark.torch.learning_rates import scale_optimizers, scale_schedulers, scaled_rates
from hvd_cluster.spark.torch.training import share_buffers
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer

if TYPE_CHECKING:

    class Callback:
        """Lightning's ``Callback``, and ``Checkpoint``, which Lightning calls last."""

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None: ...
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None: ...
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
        def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
        def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None: ...
        def on_validation_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None: ...
        def on_validation_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None: ...
        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None: ...

else:
    Callback = object

logger = logging.getLogger(__name__)

OURS = "hvd_cluster"
"""The key of our part of a checkpoint of Lightning: history, epochs, best epoch."""
LOSSES = {"train": ("train_loss", "loss"), "validation": ("val_loss", "validation_loss", "valid_loss", "loss")}
"""Names under which a module may log its loss, where its step returns none."""


@dataclass
class FitRecord:
    """How far the fit is, on one rank: the same on all ranks, but for the rows of rank 0 in the progress."""

    epochs: EpochRange
    history: list[dict[str, Any]] = field(default_factory=list)
    best: BestEpoch = field(default_factory=BestEpoch)
    totals: dict[str, PhaseTotals] = field(default_factory=dict)
    """Those of the present epoch: of the training, and of the validation if there was one."""
    last_weights: list[torch.Tensor] = field(default_factory=list)
    """Those at the end of the training, before callbacks of the user change them; where another epoch is kept."""
    optimizers: list[str] = field(default_factory=list)
    """Their classes; empty until the Trainer has made them, unless an earlier fit had some."""
    is_elastic: bool = False
    """Whether ranks come and go: then all of them keep the states of the best epoch."""

    @classmethod
    def of(cls, epochs: int, kept: Mapping[str, Any] | None, is_elastic: bool = False) -> FitRecord:
        """``kept`` is what a checkpoint has of ours."""
        if kept is None:
            return cls(EpochRange.of(epochs), is_elastic=is_elastic)
        history = list(kept["history"])
        epochs_left = EpochRange.of(epochs, len(history), tuple(kept["epochs"]))
        optimizers = list(kept.get("optimizers", []))
        return cls(epochs_left, history, BestEpoch(**kept["best"]), optimizers=optimizers, is_elastic=is_elastic)

    def found(self, optimizers: Iterable[Any]) -> None:
        """The ``optimizers`` of this fit. Raises ValueError where the earlier fit had those of other classes."""
        names = [type(each).__name__ for each in optimizers]
        if self.optimizers and self.optimizers != names:
            raise ValueError(
                f"the checkpoint of this run_id has the state of {', '.join(self.optimizers)}, but the optimizers are "
                f"{', '.join(names)} now; give another run_id, or the optimizers of that run"
            )
        self.optimizers = names

    def kept(self) -> dict[str, Any]:
        """Our part of a checkpoint: the states of the best epoch only where they are not those of the last."""
        is_last = self.best.epoch == len(self.history) - 1
        best = replace(self.best, states={}) if is_last else self.best
        return {
            "history": self.history,
            "epochs": [self.epochs.first, self.epochs.end],
            "best": vars(best),
            "optimizers": self.optimizers,
        }


@dataclass(frozen=True)
class Monitor:
    """Which value says whether an epoch is better than another: a logged one, or the loss of the validation."""

    name: str | None = None
    falls: bool = True

    def value(self, record: FitRecord, metrics: Mapping[str, Any]) -> float | None:
        """That of the present epoch, smaller if better; None if there is none."""
        validation = record.totals.get("validation")
        if self.name is not None:
            found = float(metrics[self.name]) if self.name in metrics else None
        else:
            found = validation.loss_or(*LOSSES["validation"]) if validation is not None else None
        return found if found is None or self.falls else -found


def monitor_of(callbacks: Iterable[Any]) -> Monitor:
    """The value that the first ``ModelCheckpoint`` among the ``callbacks`` monitors, or else the loss of validation."""
    for callback in callbacks:
        if lightning_base(type(callback), "ModelCheckpoint") is not None and callback.monitor is not None:
            return Monitor(callback.monitor, callback.mode == "min")
    return Monitor()


class ValueExchange(Callback):
    """Comes before the callbacks of the user: they see values of all ranks.

    It also multiplies learning rates by the number of ranks, and looks for losses that are not finite.
    """

    def __init__(
        self, record: FitRecord, values: ValueRecorder, batches: NamedBatches, reporter: ProgressReporter, finite: bool
    ) -> None:
        super().__init__()
        self._record = record
        self._values = values
        self._batches = batches
        self._reporter = reporter
        self._finite = finite
        self._train = self._validation = PhaseValues()
        self._norms: list[torch.nn.Module] = []
        self._has_shared = False
        self._state_names = frozenset(values.module.state_dict())

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        check_state_names(pl_module, self._state_names)
        self._record.found(trainer.optimizers)
        scale_optimizers(trainer.optimizers, basics.size())
        scale_schedulers((each.scheduler for each in trainer.lr_scheduler_configs), basics.size())
        scale_averaging(trainer.callbacks, basics.size())

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._train = PhaseValues()
        self._has_shared = False
        self._record.totals = {}
        self._values.between = {}
        self._reporter.begin()

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batches.begin(batch_idx)
        rows = 0 if self._batches.is_filler else checked_rows(batch)
        self._values.begin(self._train, rows, is_training=True)
        if rows == 1:  # which has no variance, so layers of batch norm use their running averages for it
            self._norms = [each.eval() for each in pl_module.modules() if _is_norm(each) and each.training]

    @override
    def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
        if self._finite:
            require_finite(loss.detach(), trainer.fit_loop.epoch_loop.batch_idx, trainer.current_epoch)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = loss_of(outputs)
        if loss is not None and pl_module.automatic_optimization and not self._batches.is_filler:
            loss = loss * trainer.accumulate_grad_batches / self._batches.weight  # Lightning has divided it
        self._batches.end()
        self._values.end(loss)
        self._restore_norms()
        if basics.rank() == 0:
            seen = self._train
            self._reporter.step(trainer.current_epoch, self._record.epochs.end, seen.rows, lambda: _mean(seen))
        if trainer.is_last_batch:  # before the validation
            self._share(trainer)

    def _restore_norms(self) -> None:
        for norm in self._norms:
            norm.train()
        self._norms = []

    def _share(self, trainer: Any) -> None:
        """Ranks without rows get the state of one with rows: the batch that they have is no step."""
        self._has_shared = True
        if self._batches.together:
            share_buffers(trainer.lightning_module, self._batches.own)
            return
        with_rows = self._batches.ranks_with_rows
        if len(with_rows) < basics.size():
            trainer.strategy.share(with_rows[0])

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._has_shared:  # the epoch has ended before the last batch
            self._share(trainer)
        self._record.totals["train"] = self._values.exchange(self._train)

    @override
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._record.best.states:
            self._record.last_weights = [each.detach().clone() for each in pl_module.parameters()]

    @override
    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._validation = PhaseValues()

    @override
    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._values.begin(self._validation, checked_rows(batch), is_training=False)

    @override
    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._values.end(loss_of(outputs))

    @override
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        total = self._values.exchange(self._validation)
        if total.rows:
            self._record.totals["validation"] = total
        elif basics.rank() == 0:
            epoch = trainer.current_epoch + 1
            logger.warning("epoch %d: there are no rows for validation, so the last epoch is kept", epoch)


def check_state_names(module: torch.nn.Module, names: frozenset[str]) -> None:
    """Raise ValueError where the state of ``module`` has other ``names`` now: the caller's module cannot load it."""
    changed = sorted(names ^ module.state_dict().keys())
    if changed:
        raise ValueError(
            f"setup or configure_model of {type(module).__name__} changes the names in its state_dict: "
            f"{', '.join(changed)}; the module of the caller could not load the trained state, so make layers in "
            "__init__"
        )


def _mean(phase: PhaseValues) -> float | None:
    return None if phase.loss is None else phase.loss.number()


def _is_norm(module: torch.nn.Module) -> bool:
    """A SyncBatchNorm has the rows of all ranks, and exchanges their sums."""
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(module, hvd.SyncBatchNorm)


class FitRecorder(Callback):
    """Comes after the callbacks of the user, and ends each epoch: history, best epoch, checkpoint, progress."""

    def __init__(
        self,
        record: FitRecord,
        values: ValueRecorder,
        monitor: Monitor,
        measure: str,
        reporter: ProgressReporter,
        states: Callable[[], dict[str, Any]],
        save: Callable[[Any], None] | None,
    ) -> None:
        super().__init__()
        self._record = record
        self._values = values
        self._monitor = monitor
        self._measure = f"{measure}, {monitor}"
        self._reporter = reporter
        self._states = states
        self._save = save
        self._has_warned = False

    @override
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        scale_checkpoint(checkpoint, 1 / basics.size())
        checkpoint[OURS] = self._record.kept()

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        record, epoch = self._record, trainer.current_epoch
        gathered = allgather_object((bool(trainer.should_stop), self._values.between), "lightning.epoch")
        trainer.should_stop = any(stop for stop, _ in gathered)
        record.history.append(record_of(epoch, record.totals, [between for _, between in gathered], self._reporter))
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            record.epochs = EpochRange(record.epochs.first, epoch + 1)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.unite()  # rank 0 asks for its state
        self._keep(self._monitor.value(record, trainer.callback_metrics), epoch)
        if self._save is not None:
            with ahead(trainer):
                self._save(trainer)
        if basics.rank() == 0:
            train, validation = (record.history[-1].get(name, {}).get("loss") for name in ("train", "validation"))
            self._reporter.end(epoch, record.epochs.end, record.totals["train"].rows, train, validation)

    def _keep(self, value: float | None, epoch: int) -> None:
        """The states of this epoch, where it is the best so far."""
        best = self._record.best
        if value is None:
            self._warn_of_no_value()
            if best.loss is not None and best.measure == self._measure:  # an epoch without validation
                return
        validation = self._record.totals.get("validation")
        rows = validation.rows if validation is not None else 0
        if best.yields_to(value, self._measure, rows):
            keeps = value is not None and (basics.rank() == 0 or self._record.is_elastic)
            self._record.best = BestEpoch(epoch, value, self._states() if keeps else {}, self._measure, rows)

    def _warn_of_no_value(self) -> None:
        if "validation" in self._record.totals and not self._has_warned and basics.rank() == 0:
            self._has_warned = True
            what = self._monitor.name or "val_loss"
            logger.warning(
                "the last epoch is kept, because nothing in the validation says which one is best: log %r, or return "
                "the loss from validation_step",
                what,
            )


@contextmanager
def ahead(trainer: Any) -> Iterator[None]:
    """Inside, schedulers that follow a value have made the step that Lightning makes after all hooks of the epoch.

    A checkpoint of the epoch needs that step: a fit that goes on from it begins with the next epoch.
    """
    loop = trainer.fit_loop
    followers = [each.scheduler for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    if not followers or loop.restarting or not loop.epoch_loop._num_ready_batches_reached():
        yield
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates, states = [group["lr"] for group in groups], [deepcopy(each.state_dict()) for each in followers]
    loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    try:
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for scheduler, state in zip(followers, states, strict=True):
            scheduler.load_state_dict(state)


def record_of(
    epoch: int, totals: Mapping[str, PhaseTotals], between: Sequence[Mapping[str, float]], reporter: ProgressReporter
) -> dict[str, Any]:
    """An epoch in the history. ``between`` is what each rank has logged outside of steps: its mean over the ranks."""
    record: dict[str, Any] = {"epoch": epoch}
    for name, total in sorted(totals.items()):
        loss = total.loss_or(*LOSSES[name])
        record[name] = {"loss": math.nan if loss is None else loss, "all_metrics": dict(total.logged)}
    last = record["validation" if "validation" in record else "train"]["all_metrics"]
    last.update({name: mean for name, mean in means_of(between).items() if name not in last})
    return {**record, "rows": totals["train"].rows, "seconds": reporter.seconds()}


def in_package(package: str, body: type[Any], base: str) -> type[Any]:
    """The class ``body`` as a callback of ``package``."""
    found = import_module(f"{PACKAGES[package]}.callbacks")
    return type(body.__name__, (body, getattr(found, base)), {})


def scale_checkpoint(checkpoint: MutableMapping[str, Any], factor: float) -> None:
    """Multiply the rates in a ``checkpoint`` of Lightning."""
    for name in ("optimizer_states", "lr_schedulers"):
        if name in checkpoint:
            checkpoint[name] = [_scaled(state, factor) for state in checkpoint[name]]


def _scaled(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The state of an optimizer has rates in its groups only; that of a scheduler has them anywhere."""
    if "param_groups" in state:
        return {**state, "param_groups": scaled_rates(state["param_groups"], factor)}
    scaled: dict[str, Any] = scaled_rates(state, factor)
    return scaled
