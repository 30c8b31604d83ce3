"""Allreduce of sparse tensors: each rank has other elements, so the elements of all ranks are gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from collectives.api import InvalidRequestError, MismatchError, Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import reduction, require_sparse_op
from hvd_cluster.torch.operations.allgather import grouped_allgather_async
from hvd_cluster.torch.operations.operands import collective, synchronize


@collective(Operation.ALLGATHER, group=3)
def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: ReduceOp | None, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start adding up (Sum or Average) sparse COO tensors of one shape; returns a function that waits for the result.

    The result is a new sparse COO tensor, coalesced, with the elements of all ranks; the same one for each call.
    """
    chosen = reduction(None, op, 1.0, 1.0)["op"]
    _check(tensor, chosen)
    own = tensor.detach().coalesce()
    pieces = [own.indices().t(), own.values(), torch.tensor([own.shape])]
    handle, size = grouped_allgather_async(pieces, name, process_set), process_set.size() or 1
    gathered = functools.cache(lambda: synchronize(handle))  # a handle gives its tensors once

    @functools.cache
    def finish() -> torch.Tensor:
        indices, values, shapes = gathered()
        if (shapes != shapes[0]).any():
            raise MismatchError(
                f"sparse tensor {name!r}: the ranks disagree about the shape: {shapes.tolist()}; give them one shape"
            )
        divisor = size if chosen is ReduceOp.AVERAGE else 1
        if len(values) < 2:  # coalesce() would keep the memory of a result, which cannot grow in a later backward
            indices, values = indices.clone(), values.clone()
        if values.is_floating_point() or values.is_complex():  # divided first: the sum may be too large for 16 bits
            values, divisor = values / divisor, 1
        total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=True).coalesce()
        return total if divisor == 1 else torch.div(total, divisor, rounding_mode="trunc")

    return finish


def _check(tensor: Any, op: ReduceOp) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        raise InvalidRequestError("sparse_allreduce_async needs a sparse COO tensor; use allreduce_async for others")
    require_sparse_op(op, tensor.dtype is torch.bool)
