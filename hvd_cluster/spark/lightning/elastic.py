"""A fit of a Trainer on ranks that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch

import hvd_cluster.torch as hvd
from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.lightning.trainer_strategy import GradientCallback, TrainerStrategy
from hvd_cluster.spark.lightning.batches import ElasticBatches
from hvd_cluster.spark.lightning.fit_recorder import FitRecord, ValueExchange, in_package
from hvd_cluster.spark.lightning.logged_values import PhaseValues, ValueRecorder
from hvd_cluster.spark.lightning.training import LightningTraining
from hvd_cluster.spark.torch.learning_rates import scale_optimizers, scale_schedulers
from hvd_cluster.spark.torch.training import share_buffers


class ElasticStrategy(TrainerStrategy):
    """The strategy of such a fit; the base of a package is added when it is made.

    A rank that has come sets its Trainer up while the others train. So nothing is combined before :attr:`is_training`:
    then the state of the training gives all ranks the same start.
    """

    package: str
    is_training = False

    @property
    @override
    def is_distributed(self) -> bool:
        """Always: Lightning refuses a value that is logged again after the answer has changed."""
        return True

    @override
    def _share_module(self) -> None:
        return

    @override
    def _share_optimizers(self) -> None:
        return

    @override
    def _first_callback(self) -> Any:
        return in_package(self.package, GradientCallback, "Callback")(self._distributed)

    @override
    def barrier(self, name: str | None = None) -> None:
        if self.is_training:
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return super().broadcast(obj, src) if self.is_training else obj


LOCAL_HOOKS = frozenset({"on_train_start", "on_train_epoch_start"})
"""Hooks that not all ranks call: a rank that comes in the middle of an epoch has not called the second one."""


class ElasticExchange(ValueExchange):
    """Combines values in an elastic fit. After a loss, the values of this rank are again those of the last commit."""

    def __init__(self, record: FitRecord, values: ValueRecorder, *others: Any) -> None:
        super().__init__(record, values, *others)
        self._committed = PhaseValues()
        values.keeps_metrics, values.local_hooks = True, LOCAL_HOOKS

    @override
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for values in (self._train, self._validation):
            self._values.forget(values)
        super().on_train_epoch_start(trainer, pl_module)

    @override
    def _share(self, trainer: Any) -> None:
        """Nothing yet: the last step of an epoch is committed before."""

    def commit(self) -> None:
        """Keep the values of the training so far."""
        self._committed = self._train.copied()

    def share_averages(self, trainer: Any) -> None:
        """Give all ranks the averages of batch norm of the rank with the most batches. All ranks call it."""
        share_buffers(trainer.lightning_module, self._batches.own)

    def interrupted(self) -> None:
        """The step, or the validation, that was under way will begin again."""
        self._train = self._committed.copied()
        self._values.forget(self._validation)
        self._restore_norms()
        self._batches.is_filler = False


UNSAVED = ("dirpath", "_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes of a ModelCheckpoint that all ranks need, and that are not in its state."""


class TrainerPlace:
    """How far the loops of ``trainer`` are, and what its schedulers and callbacks keep: plain values, for a commit.

    ``metrics`` has what callbacks could see at the end of the last epoch.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.metrics: dict[str, float] = {}
        loop, steps = trainer.fit_loop, trainer.fit_loop.epoch_loop
        progress = (
            loop.epoch_progress,
            steps.batch_progress,
            steps.scheduler_progress,
            steps.automatic_optimization.optim_progress,
        )
        self._counts = [count for each in progress for count in _counts_in(each)]

    @property
    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._trainer.lr_scheduler_configs]

    def values(self) -> dict[str, Any]:
        """Those of the present moment."""
        trainer = self._trainer
        return {
            "counts": [holder[name] for holder, name in self._counts],
            "steps": trainer.fit_loop.epoch_loop._batches_that_stepped,
            "stops": trainer.should_stop,
            "batches": trainer.accumulate_grad_batches,
            "metrics": self.metrics,
            "schedulers": [each.state_dict() for each in self._schedulers],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {
                each.state_key: (state, _unsaved(each)) for each in trainer.callbacks if (state := each.state_dict())
            },
        }

    def end_epoch(self) -> None:
        """Take the values that callbacks see now."""
        found = self._trainer._logger_connector._callback_metrics
        self.metrics = {name: float(value) for name, value in found.items()}

    def put(self, values: dict[str, Any]) -> None:
        """Go back, or on, to the moment of ``values``."""
        trainer = self._trainer
        for (holder, name), count in zip(self._counts, values["counts"], strict=True):
            holder[name] = count
        trainer.fit_loop.epoch_loop._batches_that_stepped = values["steps"]
        trainer.should_stop = values["stops"]
        self.metrics = values["metrics"]
        seen = {name: torch.tensor(value) for name, value in self.metrics.items()}
        trainer._logger_connector._callback_metrics.update(seen)
        for scheduler, state in zip(self._schedulers, values["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if values["precision"]:
            trainer.precision_plugin.load_state_dict(values["precision"])
        for callback in trainer.callbacks:
            if callback.state_key in values["callbacks"]:
                state, unsaved = values["callbacks"][callback.state_key]
                vars(callback).update(unsaved)
                callback.load_state_dict(state)


def _unsaved(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in UNSAVED if hasattr(callback, name)}


def _counts_in(progress: Any) -> list[tuple[dict[str, Any], str]]:
    """The places of all numbers in one of Lightning's objects for progress, which are nested."""
    found: list[tuple[dict[str, Any], str]] = []
    for name, value in vars(progress).items():
        found += _counts_in(value) if is_dataclass(value) else [(vars(progress), name)]
    return found


class ElasticLightningTraining(LightningTraining):
    """A fit of one Trainer, whose loop over the epochs begins again when ranks have come or gone.

    Each step is committed. The end of an epoch, with its validation, begins again as a whole if a rank is lost in it.
    """

    EXCHANGE = ElasticExchange
    batches: ElasticBatches
    exchange: ElasticExchange

    @override
    def _batches(self, dtype: torch.dtype) -> ElasticBatches:
        return ElasticBatches(self.shard, self.fit.layout, dtype)

    @override
    def _checkpoint(self) -> bytes | None:
        """Each rank reads it: one that has come has nobody to ask."""
        return self.fit.run.read()

    @override
    def _trainer(self, strategy: type[Any]) -> Any:
        options = {"package": self.fit.package}
        self.trainer: Any = super()._trainer(type("ElasticStrategy", (ElasticStrategy, strategy), options))
        self.trainer.fit_loop.run = self._run
        return self.trainer

    def _run(self) -> None:
        """In place of Lightning's loop over epochs."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        self._set_up_data()
        loop.reset()
        loop.epoch_progress.current.completed = loop.epoch_progress.current.processed
        for each in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            each.on_iteration_done()  # they forget that a checkpoint was loaded: the state says where to go on
        self._finish_step: Callable[[Any], None] = loop.epoch_loop.on_advance_end
        loop.epoch_loop.on_advance_end = self._end_step
        self._has_begun = self._wants_to_stop = False
        self.shard.epoch = len(self.record.history)
        self._place = TrainerPlace(trainer)
        optimizers = {f"optimizer_{number}": each for number, each in enumerate(trainer.optimizers)}
        self.state: Any = hvd.elastic.TorchState(
            self.module,
            **optimizers,
            shard=self.shard,
            history=self.record.history,
            epochs=self.record.epochs,
            scale=basics.size(),
            place=self._place.values(),
        )
        hvd.elastic.run(lambda state: self._loop())(self.state)

    def _set_up_data(self) -> None:
        """Lightning does so later, and on ranks that have come alone."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        loop.setup_data()
        if trainer.enable_validation:
            trainer.validating = True
            loop.epoch_loop.val_loop.setup_data()
            trainer.training = True

    def _loop(self) -> None:
        """From the last commit on; again, when ranks have come or gone."""
        loop, record = self.trainer.fit_loop, self.record
        self._begin_world()
        if not self._has_begun:
            loop.on_run_start()
            self._has_begun = True
        self.trainer.accumulate_grad_batches = self.state.place["batches"]
        self.trainer.strategy.is_training = True
        while True:
            if len(record.history) < self.shard.epoch:
                self._end_epoch()
            elif loop.done:
                break
            else:
                self._train_rest()
        loop.on_run_end()

    def _begin_world(self) -> None:
        """Go on from the state of all ranks, with learning rates for their number."""
        trainer, state, record = self.trainer, self.state, self.record
        if trainer.validating:
            trainer.fit_loop.epoch_loop.val_loop._on_evaluation_model_train()
        trainer.training = True
        self.exchange.interrupted()
        record.best = hvd.broadcast_object(record.best, 0, "estimator.best")  # a rank that has come has none
        record.history, record.epochs = state.history, state.epochs
        self._place.put(state.place)
        trainer.fit_loop.max_epochs = record.epochs.end
        trainer.strategy.set_world_ranks()
        self._scale_to(basics.size())

    def _scale_to(self, size: int) -> None:
        if size != self.state.scale:
            scale_optimizers(self.trainer.optimizers, size / self.state.scale)
            scale_schedulers((each.scheduler for each in self.trainer.lr_scheduler_configs), size / self.state.scale)
            self.state.scale = size

    def _commit(self) -> None:
        state, record = self.state, self.record
        self.exchange.commit()
        state.history, state.epochs, state.place = record.history, record.epochs, self._place.values()
        state.commit()

    def _train_rest(self) -> None:
        """The steps that are left in the epoch. Raises ValueError where a hook wants to leave some out."""
        loop, steps = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop
        self.batches.is_open = True
        if self.shard.step == 0:
            self.batches.own = 0
            loop.on_advance_start()
            if self.trainer.current_epoch == 0:  # the loop over the steps does so in later epochs
                iter(loop._data_fetcher)
        else:
            steps._restarting = True
            steps.update_restart_stage()
            iter(loop._data_fetcher)
        self._hold_stop()
        loop.advance()
        self.batches.is_open = False
        if len(self.record.history) == self.shard.epoch:
            raise ValueError(
                f"on_train_batch_start of {type(self.module).__name__}, or of a callback, has returned -1 in step "
                f"{self.shard.step + 1} of epoch {self.shard.epoch + 1}, but workers that come and go take all steps "
                "of an epoch together; leave min_num_proc and max_num_proc out, or let it return None"
            )
        if not steps._is_training_done:  # the ranks with the rest of the epoch have gone
            steps.batch_progress.is_last_batch = True
            steps.update_lr_schedulers("epoch", update_plateau_schedulers=False)
            self._commit()

    def _end_step(self, data_fetcher: Any) -> None:
        """In place of Lightning's end of a step, which validates after the last one. A rank cannot stop here alone."""
        steps, epoch = self.trainer.fit_loop.epoch_loop, self.shard.epoch
        self._hold_stop()
        self.shard.advance()
        if not steps._is_training_done:
            self._finish_step(data_fetcher)
            if not steps._should_accumulate():
                self._commit()
            return
        if self.shard.epoch == epoch:  # max_steps are done
            self.shard.end_epoch()
        self._commit()

    def _hold_stop(self) -> None:
        """All ranks stop at the end of an epoch, where they tell each other."""
        self._wants_to_stop |= self.trainer.should_stop
        self.trainer.should_stop = False

    def _end_epoch(self) -> None:
        """All steps are committed: validate, agree whether to stop, keep the best epoch, write the checkpoint."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        self.exchange.share_averages(trainer)
        self._finish_step(loop._data_fetcher)
        trainer.should_stop |= self._wants_to_stop
        loop.on_advance_end()
        self._place.end_epoch()
        self._commit()
