"""Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding
from hvd_cluster.keras.backends import Operations
from hvd_cluster.ops.arguments import PLAIN_SUM
from hvd_cluster.tensorflow import mpi_ops
from hvd_cluster.tensorflow.operations.allreduce import OP
from hvd_cluster.tensorflow.operations.calls import combine, makes_nodes
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists


def lists(device_dense: str, device_sparse: str) -> ListBinding:
    return TensorFlowLists(device_dense, device_sparse)


def total(tensor: Any, name: str, process_set: ProcessSet) -> Any:
    return combine(OP, tensor, PLAIN_SUM, process_set, name=name, ignore_name_scope=True, by_path=True)


def in_graph(value: Any) -> Operations | None:
    operations: Any = mpi_ops
    return operations if makes_nodes() else None


def why_not_compiled() -> str | None:
    """The reason why XLA cannot compile collectives here; None if it can."""
    from hvd_cluster.tensorflow.xla.nodes import why_not

    return why_not()
