"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import Operation, ReduceOp
from hvd_cluster.operations.arguments import as_rank
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.operations.attributes import (
    backward_naming,
    collective,
    gradient_of,
    reduction_attributes,
    set_attribute,
    set_of,
)
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.operations.numbers import rank_op
from hvd_cluster.tensorflow.tensors import as_bits

__all__ = ["broadcast"]


@collective(Operation.BROADCAST)
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's tensor on every rank; all give a tensor of the same shape."""
    bits, restore = as_bits(tensor)
    how = {"root_rank": as_rank(root_rank), **set_attribute(process_set)}
    return restore(call("HorovodBroadcast", {"tensor": bits}, how, name, ignore_name_scope))


@gradient_of("HorovodBroadcast")
def _gradient(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    """The gradients are averaged over the ranks for the root; those of other ranks, which were not used, are zeros."""
    how = {**reduction_attributes(ReduceOp.AVERAGE, 1.0, 1.0), **set_of(op)}
    average = call("HorovodAllreduce", {"tensor": gradient}, how, **backward_naming(op))
    return tf.where(tf.equal(rank_op(), op.get_attr("root_rank")), average, tf.zeros_like(average))
