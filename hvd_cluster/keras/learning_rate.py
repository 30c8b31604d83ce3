"""Callbacks that change the learning rate in the course of a training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from collectives import InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.keras import variables

logger = logging.getLogger(__name__)


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr`` times the ``multiplier`` of the epoch, from ``start_epoch`` up to, but
    without, ``end_epoch``; None for no end.

    ``multiplier`` is a function of the epoch, or a number m that stands for m ** (epoch - start_epoch). With
    ``staircase`` the rate changes once in an epoch; else at each batch, and the function gets fractions of epochs. Then
    ``steps_per_epoch`` is needed where Keras does not know it. The rate is ``lr`` in the logs.

    ``momentum_correction``: where the optimizer keeps sums of past steps, which have the old rate in them, they are
    scaled when the rate changes (Goyal et al., 2017). That takes no new tracing: compiled steps go on.

    InvalidRequestError for an ``initial_lr`` of None, an unknown number of steps, and an optimizer with a
    LearningRateSchedule of its own.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise InvalidRequestError("initial_lr is None; give the learning rate at the start")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        self.multiplier = multiplier if callable(multiplier) else _powers(float(multiplier), start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the number of steps."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise InvalidRequestError(
                "the number of steps in an epoch is not known; give steps_per_epoch to the callback or to model.fit"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keep the epoch in mind."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Change the learning rate, perhaps."""
        if not self._is_active(self.current_epoch):
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def _is_active(self, epoch: int) -> bool:
        return self.start_epoch <= epoch and (self.end_epoch is None or epoch < self.end_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the learning rate."""
        if logs is not None:
            logs["lr"] = _rate(self.model.optimizer)

    def _adjust(self, epoch: float) -> None:
        variables.settle(self.model)
        optimizer, old = self.model.optimizer, _rate(self.model.optimizer)
        new = _rounded(self.initial_lr * self.multiplier(epoch), optimizer)
        if new == old:
            return
        try:
            optimizer.learning_rate = new
        except TypeError as error:
            raise InvalidRequestError(f"{error}; give the optimizer a number as its learning rate") from error
        if self.momentum_correction and old > 0:
            _scale_momentums(optimizer, new / old)


def _powers(base: float, start: int) -> Callable[[float], float]:
    return lambda epoch: float(base ** (epoch - start))


def _rate(optimizer: Any) -> float:
    rate = optimizer.learning_rate
    return float(variables.view(rate) if isinstance(rate, keras.Variable) else variables.as_array(rate))


def _rounded(rate: float, optimizer: Any) -> float:
    """``rate`` as ``optimizer`` keeps it."""
    dtype = keras.backend.standardize_dtype(optimizer.learning_rate.dtype)
    return float(np.asarray(rate).astype(np.dtype(dtype)))


def _scale_momentums(optimizer: Any, factor: float) -> None:
    """Nothing for other optimizers: what Adam or Muon call momentums are averages of gradients, without the rate."""
    used = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(used, keras.optimizers.SGD | keras.optimizers.RMSprop):
        return
    for variable in getattr(used, "momentums", None) or getattr(used, "_momentums", None) or ():
        if variable is not None:
            variables.put(variable, (variables.view(variable) * factor).astype(variable.dtype))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr`` / size() to ``initial_lr``, in equal parts, batch by batch, in the
    first ``warmup_epochs``. ``initial_lr`` is the one for all ranks together. With ``verbose`` the log of rank 0 says
    when it is reached.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        super().__init__(
            initial_lr,
            self._warm,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.warmup_epochs = warmup_epochs
        self.verbose = verbose

    def _warm(self, epoch: float) -> float:
        """Counted so that the last batch of the warm-up has the whole rate."""
        done = epoch + 1.0 / (self.steps_per_epoch or 1)
        size = basics.size()
        return (done * (size - 1) / self.warmup_epochs + 1) / size

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and epoch == self.warmup_epochs - 1 and basics.rank() == 0:
            rate = _rate(self.model.optimizer)
            logger.info("epoch %d: the learning rate has warmed up to %g", epoch + 1, rate)
