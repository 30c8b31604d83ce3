"""Operations of ranks without a tensor, and numbers of this rank, which a graph evaluates when it runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives import Operation
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.operations.attributes import collective, set_attribute
from hvd_cluster.tensorflow.operations.calls import call

tf.no_gradient("HorovodJoin")
tf.no_gradient("HorovodBarrier")


@collective(Operation.JOIN)
def join(name: str | None = None, process_set: ProcessSet = global_process_set) -> tf.Tensor:
    """The global rank that joined last, an int32 scalar, when all have joined; for ranks that run out of data first.

    See :func:`hvd_cluster.ops.submission.join`.
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


for _kind in ("Rank", "LocalRank", "LocalSize", "Size", "ProcessSetIncluded"):
    tf.no_gradient(f"Horovod{_kind}")


def rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number among all, an int32 scalar, as all of these."""
    return call("HorovodRank", {}, {}, name, named=False)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process's number on its host."""
    return call("HorovodLocalRank", {}, {}, name, named=False)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of processes on this host."""
    return call("HorovodLocalSize", {}, {}, name, named=False)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of processes of the job, or of the registered set with this id."""
    return call("HorovodSize", {}, {"process_set_id": process_set_id}, name, named=False)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this process is a member of the registered set with this id, else 0."""
    return call("HorovodProcessSetIncluded", {}, {"process_set_id": process_set_id}, name, named=False)
