"""Keras on torch."""

from __future__ import annotations

from typing import Any

from collectives import ReduceOp
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding
from hvd_cluster.keras.backends import Operations
from hvd_cluster.torch.mpi_ops import allreduce
from hvd_cluster.torch.optimizer.lists import TorchLists


def lists(device_dense: str, device_sparse: str) -> ListBinding:
    return TorchLists()


def total(tensor: Any, name: str, process_set: ProcessSet) -> Any:
    return allreduce(tensor, op=ReduceOp.SUM, name=name, process_set=process_set)


def in_graph(value: Any) -> Operations | None:
    """The tensors of torch have values at any time."""
    return None
