"""Reducescatter: each element combined over all ranks, and the rows of the result distributed over them.

The first ``shape[0] % size`` ranks get one row more than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives import Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import Compressor, compress_all, compressed, decompress_all
from hvd_cluster.ops.arguments import as_group, reduction
from hvd_cluster.ops.backward import of_group
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.operations.attributes import (
    backward_naming,
    collective,
    gradient_of,
    reduction_of,
    set_of,
)
from hvd_cluster.tensorflow.operations.calls import call, combine, combine_group
from hvd_cluster.tensorflow.operations.members import size_op
from hvd_cluster.tensorflow.tensors import as_tensor, is_continuous

OP, GROUPED_OP = "HorovodReducescatter", "HorovodGroupedReducescatter"


@collective(Operation.REDUCESCATTER)
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combine ``tensor`` (Average or Sum) over all ranks and keep this rank's rows."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    with tf.device(device_dense or None):
        small, context = compressed(compression, as_tensor(tensor))
        result = combine(OP, small, how, process_set, name=name, ignore_name_scope=ignore_name_scope)
        return compression.decompress(result, context)


def _reducescatter(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """As :func:`reducescatter`, without compression; by default the sum. Scripts use it."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    return combine(OP, tensor, how, process_set, name=name, ignore_name_scope=ignore_name_scope)


@gradient_of(OP)
def _gradient(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    """The gradients of all rows are gathered, and scaled as the tensors were."""
    return call("HorovodAllgather", {"tensor": _scaled(op, gradient)}, set_of(op), **backward_naming(op))[0]


def _scaled(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    """As :func:`hvd_cluster.ops.backward.scatter_factor`; the size is that of the run."""
    how = reduction_of(op)
    factor = tf.cast(how.prescale_factor * how.postscale_factor, gradient.dtype)
    if how.op is ReduceOp.SUM:
        factor *= tf.cast(size_op(**set_of(op)), gradient.dtype)
    return gradient * factor


@collective(Operation.REDUCESCATTER, group=0)
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    ignore_name_scope: bool = False,
) -> list[tf.Tensor]:
    """Combine each tensor (Average or Sum) over all ranks and keep this rank's rows of each."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    with tf.device(device_dense or None):
        small, contexts = compress_all(compression, as_group(tensors, tf.Tensor, as_tensor))
        results = combine_group(GROUPED_OP, small, how, process_set, name=name, ignore_name_scope=ignore_name_scope)
        return decompress_all(compression, results, contexts)


def _grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """As :func:`grouped_reducescatter`, without compression; by default the sums. Scripts use it."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    return combine_group(GROUPED_OP, tensors, how, process_set, name=name, ignore_name_scope=ignore_name_scope)


@gradient_of(GROUPED_OP)
def _grouped_gradient(op: Any, *gradients: tf.Tensor) -> Sequence[tf.Tensor | None]:
    def backward(given: list[tf.Tensor]) -> list[tf.Tensor]:
        inputs = {"tensors": [_scaled(op, gradient) for gradient in given]}
        results: list[tf.Tensor] = call("HorovodGroupedAllgather", inputs, set_of(op), **backward_naming(op))[0]
        return results

    return of_group(gradients, is_continuous, backward)
