"""Whether the graph that is being built is for XLA, and what stands for its nodes where gradients are built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

_is_backward: ContextVar[bool] = ContextVar("is_backward", default=False)


def is_compiled() -> bool:
    """Whether XLA will compile the graph. Only where a graph is built, and not in eager mode."""
    return _is_backward.get() or bool(GraphOrParentsInXlaContext(ops.get_default_graph()))


@contextmanager
def backward() -> Iterator[None]:
    """Inside, the gradients of a compiled function are built, perhaps in a graph that does not know of XLA."""
    token = _is_backward.set(True)
    try:
        yield
    finally:
        _is_backward.reset(token)


@dataclass(frozen=True)
class CompiledNode:
    """Stands for a node where the gradients of an op are built: attributes, tensors, and results of these.

    ``position`` makes the place of this rank in the process set, as it is when the program runs.
    """

    attributes: Mapping[str, Any]
    inputs: Sequence[tf.Tensor]
    outputs: Sequence[tf.Tensor]
    position: Callable[[], tf.Tensor]

    def get_attr(self, name: str) -> Any:
        """The attribute ``name``."""
        return self.attributes[name]

    def own_rows(self, gathered: tf.Tensor, index: int) -> tf.Tensor:
        """The rows of this rank in ``gathered``, to which all ranks gave as many rows as it gave."""
        shape = tf.shape(self.inputs[index])
        first = tf.reshape(self.position() * shape[0], [1])
        return tf.slice(gathered, tf.pad(first, [[0, gathered.shape.rank - 1]]), shape)
