"""The callbacks before and after those of the user, in a fit with Keras."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvd_cluster.core import basics
from hvd_cluster.spark.estimators.history import (
    LOSS,
    BestEpoch,
    RowAverages,
    any_rank,
    check_rows,
    is_better,
    losses_of,
    over_all_ranks,
    require_finite,
)
from hvd_cluster.spark.estimators.run import EpochRange

if TYPE_CHECKING:
    from hvd_cluster.spark.keras.training import ElasticKerasTraining, KerasTraining

ON_ONE_RANK = (keras.callbacks.ModelCheckpoint, keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
"""They write files, and change nothing."""


def for_rank(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Those of this rank."""
    return [each for each in callbacks if basics.rank() == 0 or not isinstance(each, ON_ONE_RANK)]


class EpochFirst(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes before the callbacks of the user: they see averages over all ranks, and the learning rate of the user."""

    def __init__(self, training: KerasTraining) -> None:
        super().__init__()
        self._training = training
        self._averages = RowAverages()
        # The rows of this call of fit, and the averages over them.
        self._present: tuple[int, Mapping[str, Any]] = 0, {}
        self._epoch = -1

    def on_train_end(self, logs: Any = None) -> None:
        """From here on, the model has the learning rate of the user."""
        self._training.rate.remove()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Let the callbacks of the user see their learning rate, where they look at it so often."""
        if self._training.looks_at_batches:
            self._training.rate.remove()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count from here."""
        self._training.rate.remove()
        self._settle()
        if epoch != self._epoch:  # or else the rest of one follows, with other ranks
            self._epoch, self._averages = epoch, RowAverages()
        self._training.reporter.begin()

    def _settle(self) -> None:
        rows, values = self._present
        self._averages.add(rows, values)
        self._present = 0, {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Look at the averages of this rank so far; batches after its own do not count."""
        if self._training.looks_at_batches:
            self._training.rate.remove()
        training, steps = self._training, self._training.steps
        if batch >= steps.own:
            return
        values = dict(logs or {})
        if batch == 0:
            check_numbers(values)
        if training.fit.terminate_on_nan and LOSS in values:
            require_finite(values[LOSS], batch, self._epoch)
        self._present = steps.rows_after(batch + 1), values
        if basics.rank() == 0:
            rows = self._averages.rows + self._present[0]
            training.reporter.step(self._epoch, training.epochs.end, rows, lambda: values.get(LOSS))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Validate, exchange the averages, and put those of all ranks into the logs and the history."""
        training = self._training
        training.rate.remove()
        self._settle()
        if training.steps.uneven and self.model.non_trainable_weights:
            training.follow(training.steps.leader)  # only it has seen no batch that counts nothing
        total = over_all_ranks({"train": self._averages, "validation": training.validated()})
        validates = training.shard.validation is not None
        check_rows(epoch, total, validates and basics.rank() == 0)
        training.history.append(record_of(epoch, total, training.reporter.seconds()))
        logs.clear()
        logs.update(flat(training.history[-1]))


class EpochLast(keras.callbacks.Callback):  # type: ignore[misc]
    """Comes after the callbacks of the user: all ranks stop together, and rank 0 keeps the best epoch.

    The steps after it have the learning rate for all ranks together.
    """

    def __init__(self, training: KerasTraining) -> None:
        super().__init__()
        self._training = training
        self._wants_to_stop = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Steps follow."""
        self._training.rate.apply()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step follows."""
        self._training.rate.apply()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A rank that stops in the middle of an epoch would leave the others waiting."""
        self._training.rate.apply()
        self._wants_to_stop |= bool(self.model.stop_training)
        self.model.stop_training = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agree, keep, write."""
        training, record = self._training, self._training.history[-1]
        wants = self._wants_to_stop or bool(self.model.stop_training)
        self.model.stop_training = any_rank(wants, "stop") if training.fit.callbacks else wants
        if self.model.stop_training:
            training.epochs = EpochRange(training.epochs.first, epoch + 1)
        value = monitored(training.fit.checkpoint_callback, self.model, logs)
        if basics.rank() == 0 or training.fit.elastic:  # ranks that come and go all have the best one
            self._keep(epoch, value)
        if basics.rank() == 0:
            training.save()
            loss, validation_loss = losses_of(record)
            training.reporter.end(epoch, training.epochs.end, record["rows"], loss, validation_loss)

    def _keep(self, epoch: int, value: float | None) -> None:
        training = self._training
        if is_better(value, training.best.loss):
            training.best = BestEpoch(epoch, value, {} if value is None else training.states())


class RestOfEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Around the calls of fit of an elastic training: ``callbacks`` hear of each step, and then it is committed.

    They hear of the beginning of a training in :meth:`begin`, and of the end of an epoch in :meth:`end`, because a
    call of fit has the rest of one epoch, or a part of it.
    """

    def __init__(self, training: ElasticKerasTraining, callbacks: Sequence[keras.callbacks.Callback]) -> None:
        super().__init__()
        self._training = training
        self._callbacks = callbacks
        for callback in callbacks:
            callback.set_model(training.model)

    def set_params(self, params: Any) -> None:
        """The callbacks hear of all epochs."""
        for callback in self._callbacks:
            callback.set_params({**params, "epochs": self._training.epochs.end})

    def begin(self) -> None:
        """The training begins, or goes on with other ranks."""
        for callback in self._callbacks:
            callback.on_train_begin({})

    def finish(self) -> None:
        """The training is over."""
        for callback in self._callbacks:
            callback.on_train_end({})

    def end(self, epoch: int) -> None:
        """All steps of ``epoch`` are committed."""
        logs: dict[str, Any] = {}
        for callback in self._callbacks:
            callback.on_epoch_end(epoch, logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Steps follow."""
        for callback in self._callbacks:
            callback.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step follows."""
        for callback in self._callbacks:
            callback.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A commit has the learning rate of the user, which does not depend on the number of ranks."""
        for callback in self._callbacks:
            callback.on_train_batch_end(batch, logs)
        self._training.rate.remove()
        self._training.shard.advance()
        self._training.state.commit()
        self._training.rate.apply()


def monitored(callback: Any, model: keras.Model, logs: Mapping[str, Any]) -> float | None:
    """The measure of an epoch, less is better: the loss of validation, or else the value that ``callback`` monitors.

    None means that the last epoch is kept. Raises ValueError where the logs do not have it.
    """
    if callback is None:
        return logs.get(f"val_{LOSS}")
    if not callback.save_best_only:
        return None
    if callback.monitor not in logs:
        raise ValueError(
            f"checkpoint_callback monitors {callback.monitor!r}, but an epoch has {sorted(logs)} only; monitor one of "
            "these, or give validation="
        )
    if callback.monitor_op is None:  # Keras looks at the metrics of the model
        callback.set_model(model)
        callback._set_monitor_op()
    value = float(logs[callback.monitor])
    return -value if bool(callback.monitor_op(1.0, 0.0)) else value


def check_numbers(logs: Mapping[str, Any]) -> None:
    """Raise ValueError where a metric is no number, but has several."""
    for name, value in logs.items():
        if math.prod(np.shape(value)) != 1:
            raise ValueError(
                f"the metric {name!r} has values of the shape {list(np.shape(value))}, but must be a number; let it "
                "make an average, as with average='macro', or leave it out"
            )


def record_of(epoch: int, averages: Mapping[str, RowAverages], seconds: float) -> dict[str, Any]:
    """An epoch in the history."""
    record: dict[str, Any] = {"epoch": epoch}
    for name, part in averages.items():
        means = {str(key): value for key, value in part.means().items()}
        if means:
            record[name] = {LOSS: means.pop(LOSS, math.nan), "all_metrics": means}
    return {**record, "rows": averages["train"].rows, "seconds": seconds}


def flat(record: Mapping[str, Any]) -> dict[str, float]:
    """``record`` as the logs of Keras: ``loss``, ``val_loss``, and the metrics by their names."""
    found: dict[str, float] = {}
    for part, prefix in (("train", ""), ("validation", "val_")):
        values = record.get(part, {})
        found |= {f"{prefix}{name}": value for name, value in values.get("all_metrics", {}).items()}
        if LOSS in values:
            found[f"{prefix}{LOSS}"] = values[LOSS]
    return found
