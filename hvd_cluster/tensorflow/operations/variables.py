"""Broadcast of variables, in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from collectives.api import InvalidRequestError, MismatchError, Operation
from hvd_cluster.operations.arguments import as_rank
from hvd_cluster.operations.positions import about
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.errors import engine_error
from hvd_cluster.tensorflow.operations.attributes import collective, set_attribute
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.tensors import as_bits

__all__ = ["broadcast_", "broadcast_values", "naming_variables", "require_variables"]

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
