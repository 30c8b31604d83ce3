"""Lists of torch's gradients, as the optimizer core sees them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from collectives import Operation, ReduceOp, override
from hvd_cluster.comparison.rosters import Roster
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding, Shipment
from hvd_cluster.gradients.targets import Target
from hvd_cluster.ops.arguments import Reduction
from hvd_cluster.ops.refused_calls import refusing
from hvd_cluster.ops.submission import Handle, HandleGroup, start
from hvd_cluster.torch.operations.allgather import sparse_allreduce_async
from hvd_cluster.torch.operations.calls import run_all, start_group
from hvd_cluster.torch.tensors import in_place


class TorchLists(ListBinding):
    """All tensors are started before the first is waited for. Gradients are combined in place."""

    @staticmethod
    @override
    def is_sparse(gradient: torch.Tensor) -> bool:
        return gradient.is_sparse

    @staticmethod
    @override
    def to_dense(gradient: torch.Tensor, target: Target) -> torch.Tensor:
        return gradient.to_dense()

    @staticmethod
    @override
    def zeros(target: Target, like: torch.Tensor | None) -> torch.Tensor:
        """A variable of Keras has its dtype by name."""
        dtype = target.dtype if isinstance(target.dtype, torch.dtype) else getattr(torch, str(target.dtype))
        device = "cpu" if like is None else like.device
        return torch.zeros(target.shape or (), dtype=dtype, device=device)

    @staticmethod
    @override
    def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([*tensors])

    @staticmethod
    @override
    def split(packed: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
        return packed.split_with_sizes([*sizes])

    @staticmethod
    @override
    def allreduce(
        shipments: Sequence[Shipment], process_set: ProcessSet, how: Reduction
    ) -> Sequence[Sequence[torch.Tensor]]:
        with torch.no_grad():
            results = run_all(partial(_started, shipment, process_set, how) for shipment in shipments)
        return [[result] if shipment.is_alone else result for shipment, result in zip(shipments, results, strict=True)]

    @staticmethod
    @override
    def gather(
        gradient: torch.Tensor, name: str, op: ReduceOp, process_set: ProcessSet, roster: Roster | None
    ) -> torch.Tensor:
        return sparse_allreduce_async(gradient, name, op, process_set)()

    @staticmethod
    @override
    def share(gradient: torch.Tensor, process_set: ProcessSet) -> torch.Tensor:
        return gradient / (process_set.size() or 1)


def _started(shipment: Shipment, process_set: ProcessSet, how: Reduction) -> Handle | HandleGroup:
    operation, name = Operation.ALLREDUCE, shipment.name
    with refusing(operation, name, process_set, None if shipment.is_alone else len(shipment.tensors)):
        if shipment.is_alone:
            return start(operation, in_place, shipment.tensors[0], name, process_set, how, tag=shipment.tag)
        return start_group(operation, in_place, shipment.tensors, list, name, process_set, how, tag=shipment.tag)
