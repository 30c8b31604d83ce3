"""The kernels of operations that wait for the other ranks, without a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.api import Operation, Request
from collectives.engine.engine import Engine
from collectives.engine.work import Work
from hvd_cluster import basics
from hvd_cluster.graphs.lanes import Lane
from hvd_cluster.operations.arguments import process_set_id
from hvd_cluster.operations.submission import label_of
from hvd_cluster.tensorflow.kernels.node import FIRST, Node, set_with
from hvd_cluster.tensorflow.native.construction import Construction
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["Barrier", "Join"]


class Barrier(Node):
    """HorovodBarrier."""

    def start(self, context: Context, engine: Engine, lane: Lane = FIRST) -> Sequence[Work]:
        """See :class:`Node`."""
        name = self.name_in(lane)
        process_set = process_set_id(self.process_set)
        request = Request(label_of(Operation.BARRIER, name), Operation.BARRIER, process_set=process_set)
        return [engine.submit(request, None, None, unnamed=name is None)]


class Join:
    """HorovodJoin. A rank that has joined stays so until all have, also if the run of the graph fails meanwhile."""

    def __init__(self, construction: Construction) -> None:
        self.process_set = set_with(construction.integer("process_set_id"))

    def run(self, context: Context) -> None:
        """Wait, and set the output."""
        self.put(context, self.wait(basics.engine()))

    def wait(self, engine: Engine) -> int:
        """Return the last rank when all have joined."""
        return engine.join(process_set_id(self.process_set))

    def put(self, context: Context, last: int) -> None:
        """Set the output."""
        context.output(0, ()).host[0] = last

    def finish(self, context: Context, engine: Engine, works: Sequence[Work]) -> None:
        """Does nothing: the thread that waits sets the output."""
