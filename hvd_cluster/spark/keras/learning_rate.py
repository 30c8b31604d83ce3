"""The learning rate in a fit with Keras: times the number of ranks in steps, and that of the user in callbacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import numpy as np

from collectives import override
from hvd_cluster.keras.variables import Array, copied, put, settle

BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


class ScaledSchedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """The rates of another schedule times a factor; no callback and no file sees it."""

    def __init__(self, schedule: Any, factor: float) -> None:
        super().__init__()
        self.schedule = schedule
        self._factor = factor

    @override
    def __call__(self, step: Any) -> Any:
        return self.schedule(step) * self._factor

    @override
    def get_config(self) -> dict[str, Any]:
        return {"schedule": self.schedule, "factor": self._factor}


class StepRate:
    """The learning rate of ``model`` times ``factor``, but only in steps.

    A step of all ranks uses as many batches as there are ranks, so it may be as many times longer. Between
    :meth:`remove` and :meth:`apply` the model has the rate of the user, who may read it, change it and save it.
    """

    def __init__(self, model: keras.Model, factor: float) -> None:
        self._model = model
        self._factor = factor
        self._is_applied = False
        self._own: Array | None = None
        self._scaled: Array | None = None

    def apply(self) -> None:
        """For the steps that follow."""
        if self._is_applied or self._factor == 1:
            return
        self._is_applied = True
        settle(self._model)
        rate, optimizer = rate_of(self._model.optimizer), inner_of(self._model.optimizer)
        if rate is not None:
            own = copied(rate)
            if self._own is None or own != self._own:
                self._own, self._scaled = own, _times(own, self._factor)
            put(rate, np.asarray(self._scaled))
        elif isinstance(getattr(optimizer, "_learning_rate", None), keras.optimizers.schedules.LearningRateSchedule):
            optimizer.learning_rate = ScaledSchedule(optimizer._learning_rate, self._factor)

    def remove(self) -> None:
        """For the callbacks that follow. A rate that nothing has changed is the same again, to the last bit."""
        if not self._is_applied:
            return
        self._is_applied = False
        settle(self._model)
        rate, optimizer = rate_of(self._model.optimizer), inner_of(self._model.optimizer)
        if rate is not None:
            scaled = copied(rate)
            if self._own is None or scaled != self._scaled:  # a train_step of the user has set it
                self._own, self._scaled = _times(scaled, 1 / self._factor), scaled
            put(rate, self._own)
        elif isinstance(getattr(optimizer, "_learning_rate", None), ScaledSchedule):
            optimizer.learning_rate = optimizer._learning_rate.schedule

    def restart(self, factor: float) -> None:
        """For another number of ranks; the variables are those of a commit, which has the rate of the user."""
        optimizer = inner_of(self._model.optimizer)
        schedule = getattr(optimizer, "_learning_rate", None)
        if isinstance(schedule, ScaledSchedule):
            optimizer.learning_rate = schedule.schedule
        if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule):
            self._model.train_function = None  # a compiled step has the factor as a constant
        self._factor, self._is_applied, self._own, self._scaled = factor, False, None, None


def inner_of(optimizer: Any) -> Any:
    """The optimizer that steps, inside of one that scales losses."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def rate_of(optimizer: Any) -> Any:
    """The variable with the learning rate; None if a schedule has it."""
    rate = getattr(inner_of(optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def _times(rate: Array, factor: float) -> Array:
    return np.asarray(rate * factor).astype(rate.dtype)


def look_at_batches(callbacks: Iterable[keras.callbacks.Callback]) -> bool:
    """Whether one of ``callbacks`` may look at the learning rate, or save it, before or after a batch."""
    return any(map(_looks_at_batches, callbacks))


def _looks_at_batches(callback: keras.callbacks.Callback) -> bool:
    if type(callback) is keras.callbacks.TensorBoard:  # it reads the rate at the end of an epoch
        return False
    if isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq == "epoch":
        return type(callback).on_train_batch_end is not keras.callbacks.ModelCheckpoint.on_train_batch_end
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, name), "__func__", None) is not getattr(base, name) for name in BATCH_HOOKS)
