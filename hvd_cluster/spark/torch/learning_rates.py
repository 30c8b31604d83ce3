"""Learning rates times the number of ranks, in optimizers of torch and in their schedulers.

A step of all ranks uses as many batches as there are ranks, so it may be as many times longer. What the user sees after
the training, and what a checkpoint has, are the rates without that factor: another fit may have more ranks, or fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

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
