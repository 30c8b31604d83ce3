"""Learning rates times the number of ranks: in optimizers, in schedulers, and in checkpoints of Lightning.

A step of all ranks uses as many batches as there are ranks, so it may be as many times longer. What the user sees after
the training, and what a checkpoint has, are the rates without that factor: another fit may have more ranks, or fewer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from hvd_cluster.spark.lightning.modules import AVERAGING, lightning_base

RATES = frozenset(
    {"lr", "initial_lr", "max_lr", "min_lr", "base_lrs", "max_lrs", "min_lrs", "_last_lr", "eta_min"},
)
"""The names of rates in the groups of optimizers and in the states of schedulers of torch."""


def scaled_rates(state: Any, factor: float) -> Any:
    """A nested ``state`` with all rates in it times ``factor``; what has no rates in it is not copied."""
    if isinstance(state, Mapping):
        return {
            name: _times(value, factor) if name in RATES else scaled_rates(value, factor)
            for name, value in state.items()
        }
    if isinstance(state, list):
        return [scaled_rates(each, factor) for each in state]
    return state


def _times(rates: Any, factor: float) -> Any:
    if isinstance(rates, list | tuple):
        return [_times(each, factor) for each in rates]
    return rates if rates is None else rates * factor


def scale_optimizers(optimizers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of ``optimizers``."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update({name: _times(group[name], factor) for name in RATES & group.keys()})


def scale_schedulers(schedulers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of ``schedulers``, so that a schedule is the same curve, times ``factor``."""
    for scheduler in schedulers:
        scheduler.load_state_dict(scaled_rates(scheduler.state_dict(), factor))


def scale_averaging(callbacks: Iterable[Any], factor: float) -> None:
    """Multiply the rates to which a ``StochasticWeightAveraging`` among the ``callbacks`` goes."""
    for callback in callbacks:
        if lightning_base(type(callback), AVERAGING) is not None:
            callback._swa_lrs = _times(callback._swa_lrs, factor)


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
