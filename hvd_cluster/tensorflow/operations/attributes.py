"""The arguments of a call as attributes of a node, and back where its gradient needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from collectives import Operation, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops import refused_calls
from hvd_cluster.ops.arguments import Reduction
from hvd_cluster.ops.backward import name_of_backward
from hvd_cluster.ops.submission import process_set_id
from hvd_cluster.tensorflow.naming import Naming

P = ParamSpec("P")
T = TypeVar("T")
SET = "process_set_id"


def collective(operation: Operation, group: int | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """As :func:`hvd_cluster.ops.refused_calls.collective`. A function that cannot be traced ends the script."""
    return refused_calls.collective(operation, group, tf.executing_eagerly)


def gradient_of(op: str) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Make a function of a node and its gradients the gradient of an op, in graphs and on tapes.

    It gets tensors, or None: the gradient of a tensor of which some rows were read is an IndexedSlices.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def call(node: Any, *gradients: Any) -> T:
            return function(node, *[each if each is None else tf.convert_to_tensor(each) for each in gradients])

        register: Callable[[Callable[..., T]], Callable[..., T]] = tf.RegisterGradient(op)
        return register(call)

    return decorate


def set_attribute(process_set: ProcessSet) -> dict[str, Any]:
    """Of any collective; raises as :func:`hvd_cluster.ops.submission.process_set_id`."""
    return {SET: process_set_id(process_set)}


def set_of(op: Any) -> dict[str, Any]:
    """The attribute of a node, for its gradient."""
    return {SET: op.get_attr(SET)}


def reduction_attributes(how: Reduction) -> dict[str, Any]:
    """How elements are combined."""
    return {
        "reduce_op": int(how.op),
        "prescale_factor": repr(how.prescale_factor),
        "postscale_factor": repr(how.postscale_factor),
    }


def reduction_of(op: Any) -> Reduction:
    """How a node combines elements, for its gradient."""
    factors = (float(op.get_attr(f"{when}scale_factor")) for when in ("pre", "post"))
    return Reduction(ReduceOp(op.get_attr("reduce_op")), *factors)


def backward_naming(op: Any) -> dict[str, Any]:
    """The arguments of :func:`call` for the name of the operation that combines the gradients of a node."""
    name, naming = op.get_attr("tensor_name"), Naming(op.get_attr("naming"))
    text = name.decode() if isinstance(name, bytes) else name
    return {
        "name": name_of_backward(text or None),
        "ignore_name_scope": Naming.UNSCOPED in naming,
        "by_path": Naming.BY_PATH in naming,
    }
