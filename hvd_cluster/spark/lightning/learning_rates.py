"""Learning rates times the number of ranks, in callbacks and checkpoints of Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from hvd_cluster.spark.lightning.modules import AVERAGING, lightning_base
from hvd_cluster.spark.torch.learning_rates import multiplied, scaled_rates


def scale_averaging(callbacks: Iterable[Any], factor: float) -> None:
    """Multiply the rates to which a ``StochasticWeightAveraging`` among the ``callbacks`` goes."""
    for callback in callbacks:
        if lightning_base(type(callback), AVERAGING) is not None:
            callback._swa_lrs = multiplied(callback._swa_lrs, factor)


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
