"""Broadcast of variables, in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives.api import InvalidRequestError, Operation
from hvd_cluster.operations.arguments import as_rank
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.operations.attributes import collective, set_attribute
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.tensors import as_bits

__all__ = ["broadcast_", "broadcast_values"]

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
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise InvalidRequestError(
                f"an object of type {type(variable).__name__} is not a variable; give tf.Variables or Keras variables"
            )
    if not variables:
        return []
    pairs = [as_bits(variable) for variable in variables]
    how = {"root_rank": as_rank(root_rank), **set_attribute(process_set)}
    values = call("HorovodGroupedBroadcast", {"tensors": [bits for bits, _ in pairs]}, how, name)
    return [
        variable.assign(restore(value)) for variable, value, (_, restore) in zip(variables, values, pairs, strict=True)
    ]
