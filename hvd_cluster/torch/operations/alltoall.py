"""Alltoall: each rank sends some of its rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from collectives import Operation
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import as_splits
from hvd_cluster.ops.backward import name_of_backward
from hvd_cluster.ops.submission import Handle, run, start
from hvd_cluster.torch.operations.calls import apply, collective, is_recorded
from hvd_cluster.torch.tensors import of_other_shape, require_tensor, with_splits

Splits: TypeAlias = "Sequence[int] | torch.Tensor | None"


@collective(Operation.ALLTOALL)
def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start sending ``splits[r]`` rows to each rank r; synchronize gives (tensor, received_splits)."""
    return start(Operation.ALLTOALL, with_splits, tensor, name, process_set, splits=as_splits(splits))


@collective(Operation.ALLTOALL)
def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send ``splits[r]`` consecutive rows to each rank r, and concatenate the received rows in rank order.

    Without ``splits``, equal shares; with them the result is (tensor, received_splits), the latter int32.
    """
    if splits is None and not is_recorded(require_tensor(tensor)):
        result: torch.Tensor = run(Operation.ALLTOALL, of_other_shape, tensor, name, process_set, splits=())
        return result
    output, received = _alltoall(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def _alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
) -> tuple[torch.Tensor, torch.Tensor]:
    result: tuple[torch.Tensor, torch.Tensor]
    if is_recorded(require_tensor(tensor)):
        result = apply(HorovodAlltoall, tensor, splits, name, process_set)
    else:
        result = run(Operation.ALLTOALL, with_splits, tensor, name, process_set, splits=as_splits(splits))
    return result


class HorovodAlltoall(torch.autograd.Function):
    """The gradients travel back to the senders; rows that were not sent have zeros."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = _alltoall(tensor, splits, name, process_set)
        ctx.mark_non_differentiable(received)
        ctx.arguments = received.tolist(), name_of_backward(name), process_set
        ctx.rows = len(tensor)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        returned, _ = alltoall(gradients[0], *ctx.arguments)
        kept = returned.new_zeros(ctx.rows - len(returned), *returned.shape[1:])
        return torch.cat([returned, kept]), None, None, None
