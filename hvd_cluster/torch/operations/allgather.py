"""Allgather: the tensors of all ranks, one after the other; and sparse allreduce, which gathers the elements of all."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from collectives import InvalidRequestError, MismatchError, Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import reduction, require_sparse_op
from hvd_cluster.ops.backward import name_of_backward, own_rows
from hvd_cluster.ops.submission import Handle, HandleGroup, run, start
from hvd_cluster.torch.operations.allreduce import allreduce, grouped_allreduce
from hvd_cluster.torch.operations.calls import (
    apply,
    backward_of_group,
    collective,
    is_recorded,
    listed,
    start_group,
    synchronize,
)
from hvd_cluster.torch.tensors import of_other_shape, require_tensor, with_splits


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


@collective(Operation.ALLGATHER, group=3)
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start adding up (Sum or Average) sparse COO tensors of one shape; returns a function that waits for the result.

    The result is a new sparse COO tensor, coalesced, with the elements of all ranks; the same one for each call.
    """
    chosen = reduction(None, op).op
    _check(tensor, chosen)
    own = tensor.detach().coalesce()
    pieces = [own.indices().t(), own.values(), torch.tensor([own.shape], device="cpu")]
    handle, size = grouped_allgather_async(pieces, name, process_set), process_set.size() or 1
    gathered = functools.cache(lambda: synchronize(handle))  # a handle gives its tensors once

    @functools.cache
    def finish() -> torch.Tensor:
        indices, values, shapes = gathered()
        if (shapes != shapes[0]).any():
            raise MismatchError(
                f"sparse tensor {name!r}: the ranks disagree about the shape: {shapes.tolist()}; give them one shape"
            )
        return _total(indices, values, own.shape, size if chosen is ReduceOp.AVERAGE else 1)

    return finish


def _total(indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, divisor: int) -> torch.Tensor:
    """The sparse sum of the gathered elements, divided."""
    if len(values) < 2:  # coalesce() would keep the memory of a result, which cannot grow in a later backward
        indices, values = indices.clone(), values.clone()
    if values.is_floating_point() or values.is_complex():  # divided first: the sum may be too large for 16 bits
        values, divisor = values / divisor, 1
    total = torch.sparse_coo_tensor(indices.t(), values, shape, device=values.device, check_invariants=True).coalesce()
    return total if divisor == 1 else torch.div(total, divisor, rounding_mode="trunc")


def _check(tensor: Any, op: ReduceOp) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise InvalidRequestError("sparse_allreduce_async needs a sparse COO tensor; use allreduce_async for others")
    require_sparse_op(op, tensor.dtype is torch.bool)
