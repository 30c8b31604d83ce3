"""Learning rates times the number of ranks, in optimizers of torch and in their schedulers, and a callback for these.

A step of all ranks uses as many batches as there are ranks, so it may be as many times longer. What the user sees after
the training, and what a checkpoint has, are the rates without that factor: another fit may have more ranks, or fewer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import override
from hvd_cluster.core import basics
from hvd_cluster.spark.torch.callbacks import FitCallback
from hvd_cluster.spark.torch.payload import on_cpu

RATES = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min"},
)
"""The names of rates in the groups of optimizers and in the states of schedulers of torch."""


def scaled_rates(state: Any, factor: float) -> Any:
    """A nested ``state`` with all rates in it times ``factor``; what has no rates in it is not copied."""
    if isinstance(state, Mapping):
        return {
            name: multiplied(value, factor) if name in RATES else scaled_rates(value, factor)
            for name, value in state.items()
        }
    if isinstance(state, list):
        return [scaled_rates(each, factor) for each in state]
    return state


def multiplied(rates: Any, factor: float) -> Any:
    """``rates``, one or several or None, times ``factor``."""
    if isinstance(rates, list | tuple):
        return [multiplied(each, factor) for each in rates]
    return rates if rates is None else rates * factor


def scale_optimizers(optimizers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of ``optimizers``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({name: multiplied(group[name], factor) for name in RATES & group.keys()})


def scale_schedulers(schedulers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of ``schedulers``, so that a schedule is the same curve, times ``factor``."""
    for scheduler in schedulers:
        scheduler.load_state_dict(scaled_rates(scheduler.state_dict(), factor))


def scaled_state(state: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """The ``state_dict()`` of an optimizer, on the CPU, with its learning rates times ``factor``."""
    found: dict[str, Any] = on_cpu(state)
    return {**found, "param_groups": scaled_rates(found["param_groups"], factor)}


class SchedulerCallback(FitCallback):
    """Moves the learning rate by a scheduler of torch, once after each epoch.

    Args:
        make: a function from the optimizer to its scheduler, as ``lambda optimizer: StepLR(optimizer, 5)``. One that
            has ``metrics`` in its ``step()``, as ReduceLROnPlateau, gets the loss of validation, or else of training.
    """

    def __init__(self, make: Callable[[torch.optim.Optimizer], Any]) -> None:
        self._make = make
        self._scheduler: Any = None

    @override
    def on_train_begin(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, history: Sequence[Mapping[str, Any]]
    ) -> None:
        """Make the scheduler; where a training goes on, it is as after the epochs of ``history``.

        ``make`` sees the learning rates of the user; afterwards those of the scheduler are multiplied, too.
        """
        size = basics.size() if basics.is_initialized() else 1
        scale_optimizers([optimizer], 1 / size)
        self._make_scheduler(optimizer, history)
        scale_optimizers([optimizer], size)
        scale_schedulers([self._scheduler], size)

    def _make_scheduler(self, optimizer: torch.optim.Optimizer, history: Sequence[Mapping[str, Any]]) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        self._scheduler = self._make(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the optimizer has made no step since
            for record in history:
                self._step(record)
        if history:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    @override
    def on_epoch_end(self, epoch: int, history: Sequence[Mapping[str, Any]]) -> None:
        """Let it step."""
        self._step(history[-1])

    def _step(self, record: Mapping[str, Any]) -> None:
        if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self._scheduler.step(record.get("validation", record["train"])["loss"])
        else:
            self._scheduler.step()
