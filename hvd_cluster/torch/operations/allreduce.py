"""Allreduce: each element combined over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives import Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import Compressor, compress_all, compressed, decompress_all
from hvd_cluster.ops.arguments import Reduction, reduction
from hvd_cluster.ops.backward import name_of_backward, require_linear
from hvd_cluster.ops.submission import Handle, HandleGroup, run, start
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.operations.calls import (
    apply,
    backward_of_group,
    collective,
    is_recorded,
    listed,
    start_group,
    synchronize,
)
from hvd_cluster.torch.tensors import in_place, of_same_shape, require_tensor


@collective(Operation.ALLREDUCE)
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start combining ``tensor`` over all ranks, element by element, into a new tensor."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    return start(Operation.ALLREDUCE, of_same_shape, tensor, name, process_set, how)


@collective(Operation.ALLREDUCE)
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start combining ``tensor`` over all ranks, in place."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    return start(Operation.ALLREDUCE, in_place, tensor, name, process_set, how)


@collective(Operation.ALLREDUCE)
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks, in place."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    result: torch.Tensor = run(Operation.ALLREDUCE, in_place, tensor, name, process_set, how)
    return result


@collective(Operation.ALLREDUCE)
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks, element by element; returns a new tensor of the same shape."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    if compression is Compression.none:
        return _allreduce(require_tensor(tensor), name, process_set, how)
    small, context = compressed(compression, require_tensor(tensor))
    result: torch.Tensor = compression.decompress(_allreduce(small, name, process_set, how), context)
    return result


def _allreduce(tensor: torch.Tensor, name: str | None, process_set: ProcessSet, how: Reduction) -> torch.Tensor:
    result: torch.Tensor
    if is_recorded(tensor):
        result = apply(HorovodAllreduce, tensor, name, process_set, how)
    else:
        result = run(Operation.ALLREDUCE, of_same_shape, tensor, name, process_set, how)
    return result


class HorovodAllreduce(torch.autograd.Function):
    """The gradients are combined with the same op and factors: each rank's tensor is a part of all results."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet, how: Reduction
    ) -> torch.Tensor:
        ctx.arguments = name_of_backward(name), process_set, how
        return _allreduce(tensor, name, process_set, how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return allreduce(gradients[0], **_arguments_of_backward(ctx)), None, None, None


def _arguments_of_backward(ctx: Any) -> dict[str, Any]:
    name, process_set, how = ctx.arguments
    require_linear(how.op)
    return {"name": name, "process_set": process_set, **how._asdict()}


@collective(Operation.ALLREDUCE, group=0)
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleGroup:
    """Start combining each tensor over all ranks, into new tensors."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    return start_group(Operation.ALLREDUCE, of_same_shape, tensors, list, name, process_set, how)


@collective(Operation.ALLREDUCE, group=0)
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleGroup:
    """Start combining each tensor over all ranks, in place."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    return start_group(Operation.ALLREDUCE, in_place, tensors, tuple, name, process_set, how)


@collective(Operation.ALLREDUCE, group=0)
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Combine each tensor over all ranks, in place."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    handle = start_group(Operation.ALLREDUCE, in_place, tensors, tuple, name, process_set, how)
    results: tuple[torch.Tensor, ...] = synchronize(handle)
    return results


@collective(Operation.ALLREDUCE, group=0)
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine each tensor over all ranks, element by element; returns new tensors of the same shapes."""
    how = reduction(average, op, prescale_factor, postscale_factor)
    small, contexts = compress_all(compression, listed(tensors))
    return decompress_all(compression, _grouped_allreduce(small, name, process_set, how), contexts)


def _grouped_allreduce(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, how: Reduction
) -> Sequence[torch.Tensor]:
    results: Sequence[torch.Tensor]
    if any(is_recorded(tensor) for tensor in tensors):
        results = apply(HorovodGroupedAllreduce, name, process_set, how, *tensors)
    else:
        results = synchronize(start_group(Operation.ALLREDUCE, of_same_shape, tensors, tuple, name, process_set, how))
    return results


class HorovodGroupedAllreduce(torch.autograd.Function):
    """As :class:`HorovodAllreduce`, for a group."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, how: Reduction, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = name_of_backward(name), process_set, how
        return tuple(_grouped_allreduce(tensors, name, process_set, how))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        arguments = _arguments_of_backward(ctx)
        results = backward_of_group(gradients, lambda given: grouped_allreduce(given, **arguments))
        return None, None, None, *results
