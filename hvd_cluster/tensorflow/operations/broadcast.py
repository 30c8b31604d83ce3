"""Broadcast: one rank's tensor on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from collectives import InvalidRequestError, MismatchError, Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import Reduction, about, as_rank
from hvd_cluster.tensorflow.errors import engine_error
from hvd_cluster.tensorflow.operations.attributes import (
    backward_naming,
    collective,
    gradient_of,
    reduction_attributes,
    set_attribute,
    set_of,
)
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.operations.members import rank_op
from hvd_cluster.tensorflow.tensors import as_bits


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
    how = {**reduction_attributes(Reduction(ReduceOp.AVERAGE)), **set_of(op)}
    average = call("HorovodAllreduce", {"tensor": gradient}, how, **backward_naming(op))
    return tf.where(tf.equal(rank_op(), op.get_attr("root_rank")), average, tf.zeros_like(average))


tf.no_gradient("HorovodGroupedBroadcast")


@collective(Operation.BROADCAST, group=0)
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite ``variables`` with the root's on every rank; returns their values. All travel as one group.

    Variables of TensorFlow or Keras. InvalidRequestError for anything else.
    """
    updates = broadcast_values(variables, root_rank, name, process_set)
    with tf.control_dependencies([] if tf.executing_eagerly() else updates):
        return [tf.convert_to_tensor(variable) for variable in variables]


def broadcast_values(variables: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet) -> list[Any]:
    """As :func:`broadcast_`; returns the assignments, which a graph has to run."""
    require_variables(variables)
    if not variables:
        return []
    pairs = [as_bits(variable) for variable in variables]
    how = {"root_rank": as_rank(root_rank), **set_attribute(process_set)}
    with naming_variables(variables):
        values = call("HorovodGroupedBroadcast", {"tensors": [bits for bits, _ in pairs]}, how, name)
    return [
        variable.assign(restore(value)) for variable, value, (_, restore) in zip(variables, values, pairs, strict=True)
    ]


def require_variables(variables: Sequence[Any]) -> None:
    """InvalidRequestError if one is no variable."""
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise InvalidRequestError(
                f"an object of type {type(variable).__name__} is not a variable; give tf.Variables or Keras variables"
            )


@contextmanager
def naming_variables(variables: Sequence[Any]) -> Iterator[None]:
    """Errors in the block about a member of the group of ``variables`` name the variable, too."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = engine_error(error)
        if not isinstance(cause, MismatchError):
            raise
        names = [getattr(each, "path", None) or each.name for each in variables]  # the path in Keras, or the name
        raise type(error)(error.node_def, error.op, f"{error.message}{about(cause, names)}") from error.__cause__
