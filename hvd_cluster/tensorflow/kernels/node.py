"""A node of a graph that waits for the other ranks: its name, and its works in the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from collectives import Engine, HorovodInternalError, Operation, Request, Work, override
from hvd_cluster.comparison.rosters import NodeNaming
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.graphs.lanes import Lane, LaneChooser
from hvd_cluster.ops.submission import label_of, process_set_id
from hvd_cluster.tensorflow.naming import Naming, place_of
from hvd_cluster.tensorflow.native.context import Context
from hvd_cluster.tensorflow.native.registration import Construction

FIRST = Lane()


class GraphNode(ABC):
    """``name`` is None in eager mode, for calls without one. ``lanes`` chooses the lane of a run.

    A node of gradients gets its name in each world.
    """

    def __init__(self, construction: Construction) -> None:
        place = place_of(construction.name, construction.text("node_name"))
        is_by_path = Naming.BY_PATH in Naming(construction.integer("naming"))
        name = construction.text("tensor_name")
        self._naming = NodeNaming(construction.integer("roster"), place.path if is_by_path else "", name)
        self.name = self._naming.first
        self.lanes = LaneChooser(is_nested=place.depth > 1)
        self.process_set = set_with(construction.integer("process_set_id"))

    def has_entered(self, engine: Engine) -> bool:
        """Whether it has its name in the world of ``engine``."""
        return self._naming.is_done(engine)

    def enter(self, engine: Engine) -> None:
        """Get the name in the world of ``engine``, perhaps after an exchange with the other ranks.

        MismatchError where the ranks have different models.
        """
        self.name = self._naming.name_in(engine)

    @abstractmethod
    def start(self, context: Context, engine: Engine, lane: Lane = FIRST) -> Sequence[Work]:
        """Submit the works of a run; see :mod:`hvd_cluster.graphs.lanes`."""

    def name_in(self, lane: Lane) -> str | None:
        """The name of a run."""
        return self.name and self.name + lane.suffix

    def finish(  # noqa: B027 - most have no such outputs
        self, context: Context, engine: Engine, works: Sequence[Work]
    ) -> None:
        """Give the outputs that were not known before ``works`` were done."""

    def run(self, context: Context) -> None:
        """Run the operation, and wait; raises its error."""
        engine = basics.engine()
        if not self.has_entered(engine):
            self.enter(engine)
        works = self.start(context, engine)
        synchronize(engine, works)
        self.finish(context, engine, works)


def set_with(id: int) -> ProcessSet:
    """A process set as far as an operation needs it: nodes know the id."""
    if not id:
        return global_process_set
    process_set = ProcessSet([])
    process_set.process_set_id = id
    return process_set


def synchronize(engine: Engine, works: Sequence[Work]) -> None:
    """Wait for all of ``works``; raises the error of one."""
    try:
        for work in works:
            engine.synchronize(work)
    except HorovodInternalError:
        for work in works:
            with suppress(HorovodInternalError):  # the names must be free
                engine.synchronize(work)
        raise


class BarrierKernel(GraphNode):
    """HorovodBarrier."""

    @override
    def start(self, context: Context, engine: Engine, lane: Lane = FIRST) -> Sequence[Work]:
        name = self.name_in(lane)
        process_set = process_set_id(self.process_set)
        request = Request(label_of(Operation.BARRIER, name), Operation.BARRIER, process_set=process_set)
        return [engine.submit(request, None, None, unnamed=name is None)]


class JoinKernel:
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
