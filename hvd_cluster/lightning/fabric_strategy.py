"""The strategy of Lightning Fabric."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import hvd_cluster.torch as hvd
from collectives import override
from hvd_cluster.lightning.bases import FabricBase
from hvd_cluster.lightning.distributed_optimizers import DistributedOptimizers, followed
from hvd_cluster.lightning.module_state import broadcast_module, join_metrics
from hvd_cluster.lightning.ranks_strategy import RanksStrategy


class FabricStrategy(RanksStrategy, FabricBase):
    """Trains on the ranks that a launcher has started: ``Fabric(strategy="horovod")``.

    The arguments are those of the Trainer's strategy, with ``precision`` in place of ``precision_plugin``. All members
    call ``fabric.setup()`` with the same modules and optimizers. Gradients are averages when ``fabric.backward()`` has
    returned, unless ``fabric.no_backward_sync()`` lets them add up. Where ranks have different numbers of batches, call
    ``hvd_cluster.torch.join()``.
    """

    @override
    def _prepare(self) -> None:
        self._backward_sync_control = BackwardControl(self._distributed)
        self._modules: list[weakref.ref[torch.nn.Module]] = []

    def _set_world_ranks(self) -> None:
        """As :meth:`set_world_ranks`: Fabric has another name for it."""
        self.set_world_ranks()

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()

    @override
    def module_to_device(self, module: torch.nn.Module) -> None:
        module.to(self.root_device)

    @override
    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        broadcast_module(module, self.root_rank, self.process_set)
        self._modules.append(weakref.ref(module))
        self._undo.callback(join_metrics(module, self.process_set))
        return module

    @override
    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        modules = [module for each in self._modules if (module := each()) is not None]
        named = [pair for module in modules for pair in module.named_parameters()]
        wrapped: torch.optim.Optimizer = self._distributed.wrap(optimizer, named)
        hvd.broadcast_optimizer_state(wrapped, self.root_rank, process_set=self.process_set)
        return wrapped

    @override
    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._combined(tensor, group, reduce_op)

    @override
    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, module, *args, **kwargs)
        self._distributed.after_backward()

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        with self._distributed.stepping(optimizer) as complete:
            closure = kwargs.pop("closure", None)
            if closure is not None:
                return super().optimizer_step(optimizer, closure=followed(closure, complete), **kwargs)
            complete()
            return super().optimizer_step(optimizer, **kwargs)  # a GradScaler accepts no closure


class BackwardControl:
    """``fabric.no_backward_sync()``."""

    def __init__(self, distributed: DistributedOptimizers) -> None:
        self._distributed = distributed

    def no_backward_sync(self, module: torch.nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Backward inside adds up gradients on each rank, if ``enabled``."""
        return self._distributed.paused() if enabled else nullcontext()
