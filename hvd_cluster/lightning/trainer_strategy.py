"""The strategy of Lightning's Trainer, and what it does before all callbacks of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

import hvd_cluster.torch as hvd
from collectives import InvalidRequestError, override
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.lightning.bases import Callback, TrainerBase
from hvd_cluster.lightning.distributed_optimizers import DistributedOptimizers, followed
from hvd_cluster.lightning.module_state import broadcast_module, join_batch_norm, join_metrics
from hvd_cluster.lightning.ranks_strategy import RanksStrategy


class TrainerStrategy(RanksStrategy, TrainerBase):
    """Trains on the ranks that a launcher has started: ``Trainer(strategy="horovod")``.

    ``hvdrun``, Ray, Spark and all other launchers of this project work; the strategy calls ``hvd.init()``. Without a
    launcher it trains on one process. Each process has one device, so ``devices`` and ``num_nodes`` are left out.

    ``compression``, ``op``, ``gradient_predivide_factor``, ``groups``, ``sparse_as_dense``, ``process_set`` and
    ``sharded`` are those of :func:`hvd_cluster.torch.DistributedOptimizer`; the members of ``process_set`` are the
    ranks of the Trainer, and only they make one. With ``sharded`` all ranks need equally many batches, and all call
    ``trainer.save_checkpoint()``. ``accelerator``, ``checkpoint_io`` and ``precision_plugin`` go to Lightning. For
    gradients that add up over several batches, use ``Trainer(accumulate_grad_batches=...)``. Learning rates are not
    scaled. Raises InvalidRequestError for bad arguments, when the Trainer is made.
    """

    _callback_kind: type[Any]

    @override
    def setup_environment(self) -> None:
        self.set_world_ranks()
        super().setup_environment()

    @override
    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            require_no_swaps(trainer.callbacks, self._distributed.options.sharded)
        self._undo.callback(join_metrics(self.lightning_module, self.process_set))
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        if self._layer_sync is not None:
            self._undo.callback(self._join_layers())
        super().setup(trainer)
        self._share_module()
        self._distribute_optimizers()
        self._share_optimizers()
        first = self._first_callback()
        if first is not None:
            trainer.callbacks.insert(0, first)
            self._undo.callback(trainer.callbacks.remove, first)

    def _first_callback(self) -> Any:
        """Comes before all callbacks of the user; None in a world of one."""
        if not self.is_distributed:
            return None
        return self._callback_kind(self.process_set, self._distributed, self.share)

    def _share_module(self) -> None:
        broadcast_module(self.lightning_module, self.root_rank, self.process_set)

    def _share_optimizers(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                hvd.broadcast_optimizer_state(optimizer, self.root_rank, process_set=self.process_set)

    def _join_layers(self) -> Callable[[], None]:
        """``Trainer(sync_batchnorm=True)``, or a plugin of the user."""
        if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":  # that class needs torch.distributed
            return join_batch_norm(self.lightning_module, self.process_set)
        self.model = self._layer_sync.apply(self.model)
        return self._restore_layers

    def _restore_layers(self) -> None:
        self.model = self._layer_sync.revert(self.model)

    def _distribute_optimizers(self) -> None:
        named = list(self.lightning_module.named_parameters())
        self._replace_optimizers([self._distributed.wrap(_inner(each), named) for each in self.optimizers])
        self._undo.callback(self._release_optimizers)

    def _release_optimizers(self) -> None:
        self._replace_optimizers([self._distributed.unwrap(each) for each in self.optimizers])

    def _replace_optimizers(self, replacements: Sequence[Any]) -> None:
        """Also in the schedulers, because callbacks look for the optimizers of schedulers."""
        earlier = [_inner(each) for each in self.optimizers]
        self.optimizers = list(replacements)
        for scheduler in self._schedulers():
            for old, new in zip(earlier, replacements, strict=True):
                if getattr(scheduler, "optimizer", None) is old:
                    scheduler.optimizer = new

    def _schedulers(self) -> Iterator[Any]:
        return (config.scheduler for config in self.lr_scheduler_configs)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._distributed.unite()

    def share(self, rank: int) -> None:
        """Go on from the state of the global ``rank``, which has taken the most steps in this epoch."""
        broadcast_module(self.lightning_module, rank, self.process_set)
        for optimizer in self.optimizers:
            hvd.broadcast_optimizer_state(optimizer, rank, process_set=self.process_set)
        loop = self.lightning_module.trainer.fit_loop.epoch_loop
        progress = loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress
        stateful = [*self._schedulers(), *progress]
        states = [each.state_dict() for each in stateful], loop._batches_that_stepped
        states = hvd.broadcast_object(states, rank, "lightning.progress", self.process_set)
        for each, state in zip(stateful, states[0], strict=True):
            each.load_state_dict(state)
        loop._batches_that_stepped = states[1]
        for callback in filter(is_averaging, self.lightning_module.trainer.callbacks):
            share_average(callback, rank, self.process_set)

    @override
    def model_to_device(self) -> None:
        self.model.to(self.root_device)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._combined(tensor, group, reduce_op)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        return self._distributed.paused()

    @override
    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._distributed.stepping(optimizer) as complete:
            return super().optimizer_step(optimizer, followed(closure, complete), model, **kwargs)


class GradientCallback(Callback):
    """Combines gradients after each backward."""

    def __init__(self, optimizers: DistributedOptimizers) -> None:
        super().__init__()
        self._distributed = optimizers

    @override
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._distributed.after_backward()


class FirstCallback(GradientCallback):
    """Combines gradients after each backward, and ends epochs in which ranks have different numbers of batches.

    A rank that has used up its batches takes part in the steps of the others, without data, until all have. Then, if
    the numbers of batches differ, all call ``share`` with the global rank that had the most. In an epoch this costs two
    small operations.
    """

    def __init__(
        self, process_set: ProcessSet, optimizers: DistributedOptimizers, share: Callable[[int], None]
    ) -> None:
        super().__init__(optimizers)
        self._process_set = process_set
        self._share = share
        self._batches = 0
        self._has_joined = False

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
        extremes = torch.tensor([self._batches, -self._batches], device="cpu")
        most, least = hvd.allreduce(extremes, name="lightning.batches", op=hvd.Max, process_set=self._process_set)
        if most != -least:
            self._share(last)


def require_no_swaps(callbacks: Sequence[Any], sharded: bool | str) -> None:
    """InvalidRequestError for a callback that exchanges parameters with its averages, where ranks share parameters.

    Each rank would exchange them back.
    """
    for callback in callbacks if sharded in (True, "host") else ():
        if is_averaging(callback):
            raise InvalidRequestError(
                f"sharded={sharded!r} lets the ranks of a host share parameters, but {type(callback).__name__} "
                'exchanges them with their averages for each validation, once on each rank; give sharded="rank"'
            )


def is_averaging(callback: Any) -> bool:
    """Whether ``callback`` is a ``WeightAveraging``, which averages the parameters of its own rank after each step."""
    return "WeightAveraging" in [base.__name__ for base in type(callback).__mro__]


def share_average(callback: Any, rank: int, process_set: ProcessSet) -> None:
    """Give all ranks the average of the global ``rank``, and the steps that are in it."""
    steps = callback._latest_update_step, callback._latest_update_epoch
    steps = hvd.broadcast_object(steps, rank, "lightning.averaging", process_set)
    callback._latest_update_step, callback._latest_update_epoch = steps
    if callback._average_model is not None:
        broadcast_module(callback._average_model, rank, process_set)


def _inner(optimizer: Any) -> Any:
    """What the user made, without Lightning's wrapper."""
    return getattr(optimizer, "_optimizer", optimizer)
