"""The common part of the strategies of Trainer and Fabric: ranks, devices, collectives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

import hvd_cluster.torch as hvd
from collectives import InvalidRequestError, ReduceOp, override
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.options import Options, check
from hvd_cluster.lightning.bases import Parallel
from hvd_cluster.lightning.distributed_optimizers import DistributedOptimizers

OPERATIONS = {
    "mean": ReduceOp.AVERAGE,
    "avg": ReduceOp.AVERAGE,
    "sum": ReduceOp.SUM,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "product": ReduceOp.PRODUCT,
}


def operation(reduce_op: Any) -> ReduceOp:
    """The reduction that Lightning calls ``reduce_op``: a word, one of torch.distributed's, or None for a sum."""
    name = "sum" if reduce_op is None else str(reduce_op).rpartition(".")[2].lower()
    if name not in OPERATIONS:
        raise InvalidRequestError(f"reduce_op={reduce_op!r} must be one of {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


def device_of(devices: Sequence[torch.device], local_rank: int, visible: int) -> torch.device:
    """The device of a rank. ``devices`` are those that Lightning has chosen, ``visible`` is the number of GPUs here.

    A process has one CPU device. ``devices=1`` gives each process the first GPU: then the local rank decides, if there
    are more. InvalidRequestError where there is no device for this rank.
    """
    if devices[0].type != "cuda":
        if len(devices) > 1:
            raise InvalidRequestError(
                f"devices={len(devices)}, but with the strategy horovod each process has one device, and a launcher "
                f"starts the processes: leave devices out, and start the script by hvdrun -np {len(devices)}"
            )
        return devices[0]
    if len(devices) == 1:
        is_choice = devices[0].index not in (0, None) or local_rank >= visible
        return devices[0] if is_choice else torch.device("cuda", local_rank)
    if local_rank >= len(devices):
        raise InvalidRequestError(
            f"local rank {local_rank} has no GPU, because devices={len(devices)}: start {len(devices)} processes on "
            "each host, or leave devices out"
        )
    return devices[local_rank]


def require_no_group(group: Any) -> None:
    """InvalidRequestError for a group of torch.distributed."""
    if group is not None:
        raise InvalidRequestError(
            f"group={group!r}: the collectives of the strategy work on its process set only; call those of "
            "hvd_cluster.torch with process_set=... for others"
        )


class RanksStrategy(Parallel):
    """The ranks are the members of ``process_set``, which all call each collective, in the same order.

    ``lightning`` are the arguments of Lightning's own class.
    """

    _package: str
    _environment_kind: type[Any]
    _rank_zero_only: Any

    def __init__(
        self,
        *,
        compression: GradientCompression = hvd.Compression.none,
        op: ReduceOp = ReduceOp.AVERAGE,
        gradient_predivide_factor: float = 1.0,
        groups: int | None = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet = global_process_set,
        sharded: bool | str = False,
        **lightning: Any,
    ) -> None:
        super().__init__(cluster_environment=self._environment_kind(process_set), **lightning)
        self._distributed = DistributedOptimizers(
            Options(compression, op, gradient_predivide_factor, groups, sparse_as_dense, process_set, sharded)
        )
        self._undo = ExitStack()
        """End the training. Nothing here waits for other ranks: one that has failed ends alone."""
        self._prepare()

    def _prepare(self) -> None:
        """The part of a subclass in the constructor, whose arguments stand here only."""

    def __repr__(self) -> str:
        """Lightning shows it where it refuses the strategy of another package."""
        return f"<{type(self).__qualname__} for {self._package}; see hvd_cluster.lightning for those of other packages>"

    def set_world_ranks(self) -> None:
        """Find the other ranks, and tell Lightning this one; Lightning calls it when a Trainer is made."""
        self._rank_zero_only.rank = self.global_rank
        check(self._distributed.options)
        _ = self.root_device  # which may not exist

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that train together."""
        members: ProcessSet = self.cluster_environment.process_set
        return members

    @property
    def root_rank(self) -> int:
        """The global rank of the first member."""
        ranks: list[int] = self.cluster_environment.ranks()
        return ranks[0]

    @property
    @override
    def root_device(self) -> torch.device:
        return device_of(self.parallel_devices, self.local_rank, torch.cuda.device_count())

    @property
    def is_distributed(self) -> bool:
        """Whether there are several ranks: Lightning then splits the data, and ``sync_dist`` has an effect."""
        return self.world_size > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @override
    def barrier(self, name: str | None = None) -> None:
        hvd.barrier(process_set=self.process_set)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        root = self.cluster_environment.ranks()[src]
        return hvd.broadcast_object(obj, root, "lightning.broadcast", self.process_set)

    @override
    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        require_no_group(group)
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return hvd.allgather(tensor.unsqueeze(0), "lightning.all_gather", self.process_set)

    def _combined(self, value: Any, group: Any, reduce_op: Any) -> Any:
        """The reduction of ``value``, if it is a tensor; anything else stays as it is. A mean is a float."""
        if not isinstance(value, torch.Tensor):
            return value
        require_no_group(group)
        op = operation(reduce_op)
        if op is ReduceOp.AVERAGE and not (value.is_floating_point() or value.is_complex()):
            value = value.to(torch.get_default_dtype())
        return hvd.allreduce(value, name="lightning.reduce", op=op, process_set=self.process_set)

    @override
    def teardown(self) -> None:
        self._undo.close()
        super().teardown()
