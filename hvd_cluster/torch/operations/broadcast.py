"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from collectives import Operation
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.backward import name_of_backward
from hvd_cluster.ops.submission import Handle, run, start
from hvd_cluster.torch.operations.allreduce import allreduce
from hvd_cluster.torch.operations.calls import apply, collective, is_recorded
from hvd_cluster.torch.tensors import in_place, of_same_shape, require_tensor


@collective(Operation.BROADCAST)
def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start copying the root's tensor to a new tensor on every rank."""
    return start(Operation.BROADCAST, of_same_shape, tensor, name, process_set, root_rank=root_rank)


@collective(Operation.BROADCAST)
def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start copying the root's tensor into ``tensor`` on every rank."""
    return start(Operation.BROADCAST, in_place, tensor, name, process_set, root_rank=root_rank)


@collective(Operation.BROADCAST)
def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` with the root's on every rank."""
    result: torch.Tensor = run(Operation.BROADCAST, in_place, tensor, name, process_set, root_rank=root_rank)
    return result


@collective(Operation.BROADCAST)
def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank; all give a tensor of the same shape."""
    result: torch.Tensor
    if is_recorded(require_tensor(tensor)):
        result = apply(HorovodBroadcast, tensor, root_rank, name, process_set)
    else:
        result = run(Operation.BROADCAST, of_same_shape, tensor, name, process_set, root_rank=root_rank)
    return result


class HorovodBroadcast(torch.autograd.Function):
    """The gradients are averaged over the ranks for the root; those of other ranks, which were not used, are zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.is_root = basics.rank() == root_rank
        ctx.arguments = name_of_backward(name), process_set
        return broadcast(tensor, root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, process_set = ctx.arguments
        average = allreduce(gradients[0], name=name, process_set=process_set)
        # Zeros that depend on the average: all ranks take part when that is differentiated in turn.
        own = average if ctx.is_root else average.masked_fill(average.new_ones((), dtype=torch.bool), 0)
        return own, None, None, None
