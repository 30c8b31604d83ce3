"""Numbers of this rank as tensors, which a graph evaluates when it runs: in an elastic job they change."""

from __future__ import annotations

import tensorflow as tf

from hvd_cluster.tensorflow.operations.calls import call

__all__ = ["local_rank_op", "local_size_op", "process_set_included_op", "rank_op", "size_op"]

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
