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
        self.batches = 0
        """Those of this rank in the epoch; batches that count nothing are left out."""

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
            self._epoch, self._averages, self.batches = epoch, RowAverages(), 0
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
        self.batches += 1
        if basics.rank() == 0:
            rows = self._averages.rows + self._present[0]
            training.reporter.step(self._epoch, training.epochs.end, rows, lambda: values.get(LOSS))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Validate, exchange the averages, and put those of all ranks into the logs and the history."""
        training = self._training
        training.rate.remove()
        self._settle()
        if self.model.non_trainable_weights:
            training.share_averages()
        total = over_all_ranks({"train": self._averages, "validation": training.validated()})
        validates = training.shard.validation is not None
        check_rows(epoch, total, validates and basics.rank() == 0)
        training.validation_rows = total["validation"].rows
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
        training, rows = self._training, self._training.validation_rows
        if training.best.yields_to(value, training.fit.measure, rows):
            states = {} if value is None else training.states()
            training.best = BestEpoch(epoch, value, states, training.fit.measure, rows)


class RestOfEpoch(keras.callbacks.Callback):  # type: ignore[misc]
    """Around the calls of fit of an elastic training, each for the rest of an epoch: each step is committed.

    ``callbacks`` of the user hear of whole epochs, and of the beginning of the training once in each process. ``steps``
    is the number of steps in a whole epoch.
    """

    def __init__(
        self,
        training: ElasticKerasTraining,
        first: EpochFirst,
        callbacks: Sequence[keras.callbacks.Callback],
        steps: int,
    ) -> None:
        super().__init__()
        self._training = training
        self._first, self._last = first, EpochLast(training)
        self._callbacks = callbacks
        self._all = [self._first, *callbacks, self._last]
        self._steps = steps
        self._done = 0

    def begin(self, known: set[int]) -> None:
        """The training begins for callbacks whose ids are not ``known``; they are from now on."""
        params = {"verbose": 0, "epochs": self._training.epochs.end, "steps": self._steps}
        for callback in self._all:
            callback.set_model(self._training.model)
            callback.set_params(params)
        for callback in self._callbacks:
            if id(callback) not in known:
                known.add(id(callback))
                callback.on_train_begin({})

    def finish(self) -> None:
        """The training is over."""
        for callback in self._all:
            callback.on_train_end({})

    def end(self, epoch: int) -> None:
        """All steps of ``epoch`` are committed."""
        logs: dict[str, Any] = {}
        for callback in self._all:
            callback.on_epoch_end(epoch, logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Steps follow: a whole epoch, or the rest of one."""
        self._done = self._training.shard.step
        self._first.on_epoch_begin(epoch, logs)
        for callback in self._callbacks if self._done == 0 else ():
            callback.on_epoch_begin(epoch, logs)
        self._last.on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step follows."""
        self._first.on_train_batch_begin(batch, logs)
        for callback in self._callbacks:
            callback.on_train_batch_begin(self._done + batch, logs)
        self._last.on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A commit has the learning rate of the user, which does not depend on the number of ranks."""
        self._first.on_train_batch_end(batch, logs)
        for callback in self._callbacks:
            callback.on_train_batch_end(self._done + batch, logs)
        self._last.on_train_batch_end(batch, logs)
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
