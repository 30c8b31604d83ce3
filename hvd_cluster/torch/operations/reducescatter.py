"""Reducescatter: each element combined over all ranks, and the rows of the result distributed over them.

The first ``shape[0] % size`` ranks get one row more than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives import Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import Compressor, compress_all, compressed, decompress_all
from hvd_cluster.ops.arguments import Reduction, reduction
from hvd_cluster.ops.backward import name_of_backward, scatter_factor
from hvd_cluster.ops.submission import Handle, HandleGroup, run, start
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.operations.allgather import allgather, grouped_allgather
from hvd_cluster.torch.operations.calls import (
    apply,
    backward_of_group,
    collective,
    is_recorded,
    listed,
    start_group,
    synchronize,
)
from hvd_cluster.torch.tensors import of_other_shape, require_tensor


@collective(Operation.REDUCESCATTER)
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start combining ``tensor`` over all ranks and keeping this rank's rows."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    return start(Operation.REDUCESCATTER, of_other_shape, tensor, name, process_set, how)


@collective(Operation.REDUCESCATTER)
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine ``tensor`` (Average or Sum) over all ranks and keep this rank's rows."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    small, context = compressed(compression, require_tensor(tensor))
    result: torch.Tensor = compression.decompress(_reducescatter(small, name, process_set, how), context)
    return result


def _reducescatter(tensor: torch.Tensor, name: str | None, process_set: ProcessSet, how: Reduction) -> torch.Tensor:
    result: torch.Tensor
    if is_recorded(tensor):
        result = apply(HorovodReducescatter, tensor, name, process_set, how)
    else:
        result = run(Operation.REDUCESCATTER, of_other_shape, tensor, name, process_set, how)
    return result


class HorovodReducescatter(torch.autograd.Function):
    """The gradients of all rows are gathered, and scaled as the tensors were.

    Those of a Sum count once for each member, so that a reducescatter followed by an allgather, whose gradient is an
    average, has the gradient of an allreduce.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet, how: Reduction
    ) -> torch.Tensor:
        ctx.arguments = name_of_backward(name), process_set
        ctx.factor = scatter_factor(how, process_set)
        return _reducescatter(tensor, name, process_set, how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return allgather(gradients[0] * ctx.factor, *ctx.arguments), None, None, None


@collective(Operation.REDUCESCATTER, group=0)
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HandleGroup:
    """Start combining each tensor over all ranks and keeping this rank's rows."""
    return _start_group(tensors, name, process_set, reduction(None, op, prescale_factor, postscale_factor))


@collective(Operation.REDUCESCATTER, group=0)
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine each tensor (Average or Sum) over all ranks and keep this rank's rows of each."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    small, contexts = compress_all(compression, listed(tensors))
    return decompress_all(compression, _grouped_reducescatter(small, name, process_set, how), contexts)


def _start_group(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, how: Reduction
) -> HandleGroup:
    return start_group(Operation.REDUCESCATTER, of_other_shape, tensors, list, name, process_set, how)


def _grouped_reducescatter(
    tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, how: Reduction
) -> Sequence[torch.Tensor]:
    results: Sequence[torch.Tensor]
    if any(is_recorded(tensor) for tensor in tensors):
        results = apply(HorovodGroupedReducescatter, name, process_set, how, *tensors)
    else:
        results = synchronize(_start_group(tensors, name, process_set, how))
    return results


class HorovodGroupedReducescatter(torch.autograd.Function):
    """As :class:`HorovodReducescatter`, for a group."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, how: Reduction, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = name_of_backward(name), process_set
        ctx.factor = scatter_factor(how, process_set)
        return tuple(_grouped_reducescatter(tensors, name, process_set, how))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results = backward_of_group(
            gradients,
            lambda given: grouped_allgather([gradient * ctx.factor for gradient in given], *ctx.arguments),
        )
        return None, None, None, *results
