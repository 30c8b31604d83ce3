"""Alltoall: each rank sends some of its rows to each rank."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives import InvalidRequestError, Operation
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.operations.attributes import backward_naming, collective, gradient_of, set_attribute, set_of
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.tensors import as_bits, as_tensor
from hvd_cluster.tensorflow.xla.scope import CompiledNode


@collective(Operation.ALLTOALL)
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` consecutive rows to each rank r, and concatenate the received rows in rank order.

    Without ``splits``, equal shares; with them the result is (tensor, received_splits), the latter int32.
    """
    bits, restore = as_bits(tensor)
    inputs = {"tensor": bits, "splits": _as_splits(splits)}
    output, received = call("HorovodAlltoall", inputs, set_attribute(process_set), name, ignore_name_scope)
    return restore(output) if splits is None else (restore(output), received)


def _as_splits(splits: Any) -> tf.Tensor:
    """An int32 vector, which is empty where rows are split equally."""
    if splits is None:
        return tf.zeros([0], tf.int32)
    tensor = as_tensor(splits)
    if not tensor.dtype.is_integer or tensor.shape.rank not in (1, None):
        raise InvalidRequestError(
            f"splits must be a list or 1-d tensor of integers, not {tensor.dtype.name} of shape {tensor.shape}"
        )
    return tf.cast(tensor, tf.int32)


@gradient_of("HorovodAlltoall")
def _gradient(op: Any, gradient: tf.Tensor, _: Any) -> tuple[tf.Tensor, None]:
    """The gradients travel back to the senders; rows that were not sent have zeros."""
    is_equal = isinstance(op, CompiledNode)
    inputs = {"tensor": gradient, "splits": _as_splits(None) if is_equal else op.outputs[1]}
    returned, _ = call("HorovodAlltoall", inputs, set_of(op), **backward_naming(op))
    if is_equal:
        return returned, None
    missing = tf.shape(op.inputs[0])[:1] - tf.shape(returned)[:1]
    zeros = tf.zeros(tf.concat([missing, tf.shape(returned)[1:]], 0), returned.dtype)
    return tf.concat([returned, zeros], 0), None
