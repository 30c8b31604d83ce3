"""The callbacks of a TorchEstimator, which run on each worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from collectives import override
from hvd_cluster.spark.estimators.history import has_stalled

__all__ = ["EarlyStopping", "FitCallback"]


class FitCallback:
    """A base class; each method does nothing. They are called on all ranks, where they see the same numbers.

    If ``stop_training`` is true on one rank after :meth:`on_epoch_end`, all ranks stop.
    """

    stop_training = False

    def on_train_begin(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, history: Sequence[Mapping[str, Any]]
    ) -> None:
        """The training begins, after the epochs of ``history``: those of an earlier fit with the same ``run_id``.

        Also again, in an elastic fit, after workers have come or gone.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """An epoch begins; the first one has the number 0."""

    def on_epoch_end(self, epoch: int, history: Sequence[Mapping[str, Any]]) -> None:
        """An epoch has ended; ``history``, see ``TorchModel.getHistory()``, ends with it."""


class EarlyStopping(FitCallback):
    """Stops the training when the loss does not fall any more.

    Args:
        patience: the number of epochs without a better one after which to stop.
        min_delta: how much lower the loss must be to count as better.
        monitor: ``"validation"`` or ``"train"``: whose loss.
    """

    def __init__(self, patience: int = 3, min_delta: float = 0.0, monitor: str = "validation") -> None:
        if monitor not in ("validation", "train"):
            raise ValueError(f"monitor is {monitor!r}, but must be 'validation' or 'train'")
        self._patience = patience
        self._min_delta = min_delta
        self._monitor = monitor

    def check(self, has_validation: bool) -> None:
        """Raise ValueError where there is no validation to look at."""
        if self._monitor == "validation" and not has_validation:
            raise ValueError(
                "EarlyStopping looks at the loss of the validation, but there is none; give validation=, or "
                "EarlyStopping(monitor='train')"
            )

    @override
    def on_epoch_end(self, epoch: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Decide. Raises ValueError where no row was kept for validation."""
        self.check(self._monitor in history[-1])
        losses = [record[self._monitor]["loss"] for record in history if self._monitor in record]
        self.stop_training = has_stalled(losses, self._patience, self._min_delta)
