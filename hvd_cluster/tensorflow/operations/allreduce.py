"""Allreduce: each element combined over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives import Operation, ReduceOp, UnsupportedRequestError
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import Compressor, compress_all, compressed, decompress_all
from hvd_cluster.ops.arguments import Reduction, as_group, reduction, require_sparse_op
from hvd_cluster.ops.backward import of_group, require_linear
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.operations.allgather import grouped_allgather
from hvd_cluster.tensorflow.operations.attributes import (
    backward_naming,
    collective,
    gradient_of,
    reduction_attributes,
    reduction_of,
    set_of,
)
from hvd_cluster.tensorflow.operations.calls import call, combine, combine_group
from hvd_cluster.tensorflow.operations.members import size_op
from hvd_cluster.tensorflow.tensors import as_tensor, is_continuous

OP, GROUPED_OP = "HorovodAllreduce", "HorovodGroupedAllreduce"


def allreduce_slices(
    slices: tf.IndexedSlices,
    name: str | None,
    compression: type[Compressor],
    how: Reduction,
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> tf.IndexedSlices:
    """The rows of all ranks, those of one index beside one another; of an Average, divided by the number of ranks.

    UnsupportedRequestError, which is a NotImplementedError, for other ops and for factors.
    """
    op, factors = how.op, how[1:]
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM) or factors != (1.0, 1.0):
        raise UnsupportedRequestError(
            f"an allreduce of IndexedSlices with op {op.name.capitalize()} and the factors {factors[0]:g} and "
            f"{factors[1]:g} is not available; "
            "use Average or Sum without factors, or tf.convert_to_tensor(slices) first"
        )
    require_sparse_op(op, slices.values.dtype is tf.bool)
    small, context = compressed(compression, slices.values)
    # In one group, so that no rank has the values of one step and the indices of another.
    values, indices = grouped_allgather([small, slices.indices], name, ignore_name_scope, process_set)
    values = compression.decompress(values, context)
    if op is ReduceOp.AVERAGE:
        size = tf.cast(size_op(process_set.process_set_id or 0), values.dtype)
        values = values // size if values.dtype.is_integer else values / size
    return tf.IndexedSlices(values, indices, slices.dense_shape)


@collective(Operation.ALLREDUCE)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Combine ``tensor`` over all ranks, element by element; returns a tensor of the same shape.

    IndexedSlices give IndexedSlices with the rows of all ranks, see :func:`allreduce_slices`.
    """
    how = reduction(average, op, prescale_factor, postscale_factor)
    if isinstance(tensor, tf.IndexedSlices):
        with tf.device(device_sparse or None):
            return allreduce_slices(tensor, name, compression, how, process_set, ignore_name_scope)
    with tf.device(device_dense or None):
        small, context = compressed(compression, as_tensor(tensor))
        result = combine(OP, small, how, process_set, name=name, ignore_name_scope=ignore_name_scope)
        return compression.decompress(result, context)


def _allreduce(
    tensor: Any,
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """As :func:`allreduce`, for a dense tensor and without compression; by default the sum. Scripts use it."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    return combine(OP, tensor, how, process_set, name=name, ignore_name_scope=ignore_name_scope)


@gradient_of(OP)
def _gradient(op: Any, gradient: tf.Tensor) -> tf.Tensor:
    attributes = _attributes_of_backward(op)
    return call(OP, {"tensor": gradient}, attributes, **backward_naming(op))


def _attributes_of_backward(op: Any) -> dict[str, Any]:
    how = reduction_of(op)
    require_linear(how.op)
    return {**reduction_attributes(how), **set_of(op)}


@collective(Operation.ALLREDUCE, group=0)
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Combine each tensor over all ranks, element by element; returns tensors of the same shapes.

    An empty list gives an empty list: there is nothing to wait for. IndexedSlices travel apart from the group, each as
    in :func:`allreduce`.
    """
    how = reduction(average, op, prescale_factor, postscale_factor)
    given = as_group(tensors, tf.Tensor, lambda tensor: tensor)
    with tf.device(device_sparse or None):
        sparse = {
            index: allreduce_slices(each, _of_member(name, index), compression, how, process_set, ignore_name_scope)
            for index, each in enumerate(given)
            if isinstance(each, tf.IndexedSlices)
        }
    dense = [each for index, each in enumerate(given) if index not in sparse]
    with tf.device(device_dense or None):
        small, contexts = compress_all(compression, as_group(dense, tf.Tensor, as_tensor))
        combined = combine_group(GROUPED_OP, small, how, process_set, name=name, ignore_name_scope=ignore_name_scope)
        results = iter(decompress_all(compression, combined, contexts))
    return [sparse[index] if index in sparse else next(results) for index in range(len(given))]


def _of_member(name: str | None, index: int) -> str | None:
    return None if name is None else f"{name}.{index}"


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOp = ReduceOp.SUM,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """As :func:`grouped_allreduce`, for dense tensors and without compression; by default the sums. Scripts use it."""
    how = reduction(None, op, prescale_factor, postscale_factor)
    return combine_group(GROUPED_OP, tensors, how, process_set, name=name, ignore_name_scope=ignore_name_scope)


@gradient_of(GROUPED_OP)
def _grouped_gradient(op: Any, *gradients: tf.Tensor) -> Sequence[tf.Tensor | None]:
    attributes = _attributes_of_backward(op)

    def backward(given: list[tf.Tensor]) -> list[tf.Tensor]:
        inputs = {"tensors": given}
        results: list[tf.Tensor] = call(GROUPED_OP, inputs, attributes, **backward_naming(op))
        return results

    return of_group(gradients, is_continuous, backward)
