"""Allreduce of IndexedSlices: each rank has other rows, so the rows of all ranks are gathered."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import ReduceOp, UnsupportedRequestError
from hvd_cluster.compression import Compressor, compressed
from hvd_cluster.operations.arguments import as_factor, require_sparse_op
from hvd_cluster.process_sets import ProcessSet
from hvd_cluster.tensorflow.operations.allgather import grouped_allgather
from hvd_cluster.tensorflow.operations.numbers import size_op

__all__ = ["allreduce_slices"]


def allreduce_slices(
    slices: tf.IndexedSlices,
    name: str | None,
    compression: type[Compressor],
    op: ReduceOp,
    factors: tuple[Any, Any],
    process_set: ProcessSet,
    ignore_name_scope: bool,
) -> tf.IndexedSlices:
    """The rows of all ranks, those of one index beside one another; of an Average, divided by the number of ranks.

    UnsupportedRequestError, which is a NotImplementedError, for other ops and for factors.
    """
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM) or any(as_factor(factor) != 1.0 for factor in factors):
        raise UnsupportedRequestError(
            f"an allreduce of IndexedSlices with op {op.name.capitalize()} and the factors {factors} is not available; "
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
