"""What has to be done before all callbacks of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import hvd_cluster.torch as hvd
from collectives import override
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.lightning.bases import Callback
from hvd_cluster.lightning.gradient_exchange import GradientExchange


class FirstCallback(Callback):
    """Combines gradients after each backward, and ends epochs in which ranks have different numbers of batches.

    A rank that has used up its batches takes part in the steps of the others, without data, until all have. Then, if
    the numbers of batches differ, all call ``share`` with the global rank that had the most. In an epoch this costs two
    small operations.
    """

    def __init__(self, process_set: ProcessSet, exchange: GradientExchange, share: Callable[[int], None]) -> None:
        super().__init__()
        self._process_set = process_set
        self._exchange = exchange
        self._share = share
        self._batches = 0
        self._has_joined = False

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._exchange.after_backward()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1
        if trainer.is_last_batch:
            self._join()

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._has_joined:  # the epoch has ended before the last batch, or there was none
            self._join()
        self._batches, self._has_joined = 0, False

    def _join(self) -> None:
        self._has_joined = True
        last = hvd.join(process_set=self._process_set)
        extremes = torch.tensor([self._batches, -self._batches])
        most, least = hvd.allreduce(extremes, name="lightning.batches", op=hvd.Max, process_set=self._process_set)
        if most != -least:
            self._share(last)
