"""What the classes here use of Lightning's base classes, for type checkers.

Lightning exists twice: as ``lightning``, and as ``pytorch_lightning`` with ``lightning_fabric``. A strategy of one is
none of the other. So each class here is written once, without its base; ``packages`` adds the base of each package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:

    class Callback:
        """``Callback`` of the Trainer."""

        def on_after_backward(self, trainer: Any, pl_module: Any) -> None: ...
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    class Parallel:
        """What the classes ``ParallelStrategy`` of Trainer and Fabric have in common."""

        cluster_environment: Any
        parallel_devices: Any
        world_size: int
        global_rank: int
        local_rank: int

        def __init__(self, **arguments: Any) -> None: ...
        @property
        def root_device(self) -> torch.device: ...
        def setup_environment(self) -> None: ...
        def teardown(self) -> None: ...
        def barrier(self, name: str | None = None) -> None: ...
        def broadcast(self, obj: Any, src: int = 0) -> Any: ...
        def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor: ...
        @property
        def distributed_sampler_kwargs(self) -> dict[str, Any]: ...

    class TrainerBase(Parallel):
        """``ParallelStrategy`` of the Trainer."""

        model: Any
        lightning_module: Any
        optimizers: list[Any]
        lr_scheduler_configs: list[Any]
        _layer_sync: Any

        def setup(self, trainer: Any) -> None: ...
        def model_to_device(self) -> None: ...
        def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any: ...
        def on_train_end(self) -> None: ...
        def block_backward_sync(self) -> AbstractContextManager[None]: ...
        def optimizer_step(
            self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
        ) -> Any: ...

    class FabricBase(Parallel):
        """``ParallelStrategy`` of Fabric."""

        _backward_sync_control: Any

        def module_to_device(self, module: torch.nn.Module) -> None: ...
        def setup_module(self, module: torch.nn.Module) -> torch.nn.Module: ...
        def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer: ...
        def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any: ...
        def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None: ...
        def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any: ...

else:
    Callback = Parallel = TrainerBase = FabricBase = object
