"""Allgather: the tensors of all ranks, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.api import Operation
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.backward import name_of_backward, own_rows
from hvd_cluster.ops.handles import Handle, HandleGroup
from hvd_cluster.torch.operations.allreduce import allreduce, grouped_allreduce
from hvd_cluster.torch.operations.operands import (
    apply,
    backward_of_group,
    collective,
    is_recorded,
    listed,
    of_other_shape,
    run,
    start,
    start_group,
    synchronize,
    with_splits,
)
from hvd_cluster.torch.tensors import require_tensor


@collective(Operation.ALLGATHER)
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start concatenating the tensors of all ranks along the first dimension."""
    return start(Operation.ALLGATHER, of_other_shape, tensor, name, process_set)


@collective(Operation.ALLGATHER)
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks in rank order; only the first dimensions may differ."""
    result: torch.Tensor
    if is_recorded(require_tensor(tensor)):
        result = apply(HorovodAllgather, tensor, name, process_set)
    else:
        result = run(Operation.ALLGATHER, of_other_shape, tensor, name, process_set)
    return result


class HorovodAllgather(torch.autograd.Function):
    """The gradients of the result are averaged over the ranks; each rank keeps the rows that it contributed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
        result: torch.Tensor
        result, counts = run(Operation.ALLGATHER, with_splits, tensor, name, process_set)
        ctx.arguments = name_of_backward(name), process_set
        ctx.rows = own_rows(counts.tolist(), process_set)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, process_set = ctx.arguments
        return allreduce(gradients[0], name=name, process_set=process_set)[ctx.rows], None, None


@collective(Operation.ALLGATHER, group=0)
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> HandleGroup:
    """Start concatenating each tensor of all ranks along the first dimension."""
    return start_group(Operation.ALLGATHER, of_other_shape, tensors, tuple, name, process_set)


@collective(Operation.ALLGATHER, group=0)
def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Concatenate each tensor of all ranks in rank order; only the first dimensions may differ."""
    results: tuple[torch.Tensor, ...]
    tensors = listed(tensors)
    if any(is_recorded(tensor) for tensor in tensors):
        results = apply(HorovodGroupedAllgather, name, process_set, *tensors)
    else:
        results = synchronize(grouped_allgather_async(tensors, name, process_set))
    return results


class HorovodGroupedAllgather(torch.autograd.Function):
    """As :class:`HorovodAllgather`, for a group."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        pairs = synchronize(start_group(Operation.ALLGATHER, with_splits, tensors, tuple, name, process_set))
        ctx.arguments = name_of_backward(name), process_set
        ctx.rows = [own_rows(counts.tolist(), process_set) for _, counts in pairs]
        return tuple(result for result, _ in pairs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        name, process_set = ctx.arguments
        averages = backward_of_group(
            gradients, lambda given: grouped_allreduce(given, name=name, process_set=process_set)
        )
        own = [None if average is None else average[rows] for average, rows in zip(averages, ctx.rows, strict=True)]
        return None, None, *own
