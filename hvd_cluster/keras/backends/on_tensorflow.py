"""Keras on TensorFlow."""

from __future__ import annotations

from typing import Any

from collectives.api import ReduceOp
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding
from hvd_cluster.keras.backends import Operations
from hvd_cluster.tensorflow import mpi_ops
from hvd_cluster.tensorflow.mpi_ops import _allreduce
from hvd_cluster.tensorflow.operations.calls import makes_nodes
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists


def lists(device_dense: str, device_sparse: str) -> ListBinding:
    return TensorFlowLists(device_dense, device_sparse)


def total(tensor: Any, name: str, process_set: ProcessSet) -> Any:
    return _allreduce(tensor, name, ReduceOp.SUM, ignore_name_scope=True, process_set=process_set, by_path=True)


def in_graph(value: Any) -> Operations | None:
    operations: Any = mpi_ops
    return operations if makes_nodes() else None
