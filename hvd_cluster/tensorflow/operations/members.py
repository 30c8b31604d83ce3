"""Operations of ranks, without a tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import Operation
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.operations.attributes import collective, set_attribute
from hvd_cluster.tensorflow.operations.calls import call

__all__ = ["barrier", "join"]

tf.no_gradient("HorovodJoin")
tf.no_gradient("HorovodBarrier")


@collective(Operation.JOIN)
def join(name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """The global rank that joined last, an int32 scalar, when all have joined; for ranks that run out of data first.

    See :func:`hvd_cluster.operations.members.join`.
    """
    return call("HorovodJoin", {}, set_attribute(process_set), name, named=False)


@collective(Operation.BARRIER)
def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Return when every member has called it, or has joined.

    In a tf.function it keeps its place between other operations with side effects, such as assignments to variables;
    collectives on tensors are none of these. In other graphs the result is the node.
    """
    node = call("HorovodBarrier", {}, set_attribute(process_set), name, independent=False)
    return None if tf.executing_eagerly() or tf.inside_function() else node
