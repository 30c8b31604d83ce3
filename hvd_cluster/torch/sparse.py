"""Sums and averages of sparse tensors, which have different elements on different ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from collectives.api import InvalidRequestError, ReduceOp
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.operations import allgather_async, synchronize

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start combining a sparse COO ``tensor`` over all ranks; what is returned waits and gives the coalesced result.

    Indices and values are gathered, under ``<name>.indices`` and ``<name>.values``, and those of the same place added.
    All ranks give tensors of one shape, with as many sparse dimensions; they may have no elements. InvalidRequestError
    for a tensor that is not sparse COO, and an ``op`` other than Average or Sum.
    """
    if not (isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo):
        raise InvalidRequestError("sparse_allreduce_async needs a sparse COO tensor; use allreduce_async for others")
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(f"op={op!r} cannot combine sparse tensors; use Average or Sum")
    here = tensor.detach().coalesce()
    parts = {"indices": here.indices().t(), "values": here.values()}
    handles = [
        allgather_async(part, None if name is None else f"{name}.{kind}", process_set) for kind, part in parts.items()
    ]

    def finish() -> torch.Tensor:
        indices, values = (synchronize(handle) for handle in handles)
        if op == ReduceOp.AVERAGE:
            values = values / (process_set.size() or 1)
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=True).coalesce()

    return finish
