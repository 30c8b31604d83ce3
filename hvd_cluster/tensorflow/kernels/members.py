"""The kernels of operations that wait for the other ranks, without a tensor."""

from __future__ import annotations

from hvd_cluster import basics
from hvd_cluster.tensorflow.native.construction import Construction
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["Barrier", "Join"]


class Barrier:
    """HorovodBarrier."""

    waits = True

    def __init__(self, construction: Construction) -> None:
        self._process_set = construction.integer("process_set_id")

    def run(self, context: Context) -> None:
        """Wait."""
        basics.engine().barrier(self._process_set)


class Join:
    """HorovodJoin."""

    waits = True

    def __init__(self, construction: Construction) -> None:
        self._process_set = construction.integer("process_set_id")

    def run(self, context: Context) -> None:
        """Wait, and set the output."""
        last = basics.engine().join(self._process_set)
        context.output(0, ()).host[0] = last
