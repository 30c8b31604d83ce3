"""The state of a training with torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import (
    EpochHandler,
    HandledState,
    Registry,
    SamplerStateHandler,
    StateDictHandler,
    StateHandler,
)
from hvd_cluster.elastic.shard_progress import ShardProgress
from hvd_cluster.elastic.steps import watchers
from hvd_cluster.torch.elastic.handlers import ModelStateHandler, OptimizerStateHandler
from hvd_cluster.torch.elastic.sampler import ElasticSampler

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]

_registry: list[tuple[type, Callable[[Any], StateHandler]]] = [
    (ElasticSampler, SamplerStateHandler),
    (torch.utils.data.DistributedSampler, EpochHandler),
    (GlobalBatches, StateDictHandler),
    (ShardProgress, StateDictHandler),
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (torch.amp.GradScaler, StateDictHandler),
]


def get_handler_registry() -> Registry:
    """The types whose values have a handler in a :class:`TorchState`, each with it; the first that fits is taken."""
    return list(_registry)


def set_handler_registry(registry: Registry) -> None:
    """Let the states that are made from now on take their handlers from ``registry``."""
    _registry[:] = registry


class TorchState(HandledState):
    """Models, optimizers, samplers, schedulers, GradScalers and other values of a training, see ObjectState::

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

    Any keyword may have any of them: several models and optimizers are fine. ``commit()`` after each step costs little:
    it copies buffers, options of optimizers and plain values, but parameters and the state of optimizers only where a
    loss might find them changed. That is so if a collective runs between the first ``step()`` and ``commit()``, such as
    the allreduce of a metric: let it run before ``step()`` or after ``commit()``.
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        super().__init__(get_handler_registry(), model=model, optimizer=optimizer, **kwargs)
        watchers.add(self._snapshots)
        _watch()


@cache
def _watch() -> None:
    """Once, and for ever: torch may be calling its hooks when the garbage collector finds a state."""
    register_optimizer_step_pre_hook(_step_began)


def _step_began(optimizer: Any, *_: Any) -> None:
    if not getattr(optimizer, "_evaluates_first", False):
        watchers.step_began()
