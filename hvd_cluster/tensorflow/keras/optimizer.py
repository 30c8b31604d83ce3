"""``DistributedOptimizer`` with the order of arguments that Horovod has for Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

import hvd_cluster.keras as keras_binding
from collectives import ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression, NoneCompressor
from hvd_cluster.gradients.options import Groups

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = NoneCompressor,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sharded: bool | str = False,
) -> Any:
    """As :func:`hvd_cluster.keras.DistributedOptimizer`."""
    return keras_binding.DistributedOptimizer(**locals())
