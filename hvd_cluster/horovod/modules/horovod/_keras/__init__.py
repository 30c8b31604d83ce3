"""What Horovod's two packages for Keras share. The first argument, keras or its backend, is not needed."""

from __future__ import annotations

from typing import Any

import hvd_cluster.keras as keras_binding
from collectives import ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.options import Groups

__all__ = [
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "create_distributed_optimizer",
    "reducescatter",
]


def create_distributed_optimizer(
    keras: Any,
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: GradientCompression,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: ReduceOp,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`hvd_cluster.keras.DistributedOptimizer`."""
    arguments = dict(locals())
    del arguments["keras"]
    return keras_binding.DistributedOptimizer(**arguments)


def broadcast_global_variables(backend: Any, root_rank: int) -> None:
    """As :func:`hvd_cluster.keras.broadcast_global_variables` without a model, which is an InvalidRequestError."""
    keras_binding.broadcast_global_variables(root_rank)


def allreduce(backend: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """As :func:`hvd_cluster.keras.allreduce`."""
    return keras_binding.allreduce(value, *args, **kwargs)


def allgather(backend: Any, value: Any, name: str | None = None) -> Any:
    """As :func:`hvd_cluster.keras.allgather`."""
    return keras_binding.allgather(value, name)


def broadcast(backend: Any, value: Any, root_rank: int, name: str | None = None) -> Any:
    """As :func:`hvd_cluster.keras.broadcast`."""
    return keras_binding.broadcast(value, root_rank, name)


def reducescatter(backend: Any, value: Any, name: str | None = None, op: ReduceOp = ReduceOp.AVERAGE) -> Any:
    """As :func:`hvd_cluster.keras.reducescatter`."""
    return keras_binding.reducescatter(value, name, op)
