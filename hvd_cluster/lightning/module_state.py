"""The module of a training on all ranks: a common start, names, batch normalization, metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import hvd_cluster.torch as hvd
from hvd_cluster.core.process_sets import ProcessSet

LAYER_STATE = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def broadcast_module(module: torch.nn.Module, root_rank: int, process_set: ProcessSet) -> None:
    """Give all ranks the parameters and buffers of ``root_rank``, a global rank."""
    hvd.broadcast_parameters([*module.named_parameters(), *module.named_buffers()], root_rank, process_set)


def names_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]]
) -> list[tuple[str, torch.nn.Parameter]] | None:
    """The parameters of ``optimizer`` with their names in the module, or by position where it does not have them.

    None where two have the same name, as in two modules.
    """
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = [(names.get(each, f"optimizer.{position}"), each) for position, each in enumerate(parameters)]
    return pairs if len({name for name, _ in pairs}) == len(pairs) else None


def join_batch_norm(module: torch.nn.Module, process_set: ProcessSet) -> Callable[[], None]:
    """Let the batch normalization in ``module`` see the batches of all ranks; returns a function that undoes it."""
    originals = {name: each for name, each in module.named_modules() if name and isinstance(each, _BatchNorm)}
    hvd.SyncBatchNorm.convert_sync_batchnorm(module, process_set)

    def restore() -> None:
        for name, original in originals.items():
            twin = module.get_submodule(name)
            for attribute in LAYER_STATE:
                setattr(original, attribute, getattr(twin, attribute))
            module.set_submodule(name, original.train(twin.training))

    return restore


def join_metrics(module: torch.nn.Module, process_set: ProcessSet) -> Callable[[], None]:
    """Let the metrics of torchmetrics in ``module`` compute over all ranks; returns a function that undoes it.

    By themselves they look for torch.distributed. A metric with a ``dist_sync_fn`` of its own keeps it.
    """
    metrics: list[Any] = [each for each in module.modules() if getattr(each, "dist_sync_fn", module) is None]
    earlier = [metric.distributed_available_fn for metric in metrics]

    def gather(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        """The states of all ranks, whose shapes may differ."""
        states = hvd.allgather_object(state.detach().cpu(), "lightning.metric", process_set)
        return [each.to(state.device) for each in states]

    for metric in metrics:
        metric.dist_sync_fn = gather
        metric.distributed_available_fn = lambda: process_set.size() != 1

    def restore() -> None:
        for metric, available in zip(metrics, earlier, strict=True):
            metric.dist_sync_fn, metric.distributed_available_fn = None, available

    return restore
