"""The kernel of a collective: the inputs of a node -> works of the engine -> its outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

from collectives import Buffer, Destination, Engine, Operation, ReduceOp, Work, override
from hvd_cluster.core import basics
from hvd_cluster.graphs.lanes import Lane
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import Reduction, as_factor
from hvd_cluster.tensorflow.kernels.node import FIRST, GraphNode
from hvd_cluster.tensorflow.native.context import Context
from hvd_cluster.tensorflow.native.registration import Construction

Pair = tuple[Buffer, Destination]


class CollectiveKernel(GraphNode):
    """One node. ``grouped``: its tensors are a group. A run reads and writes the memory of TensorFlow's own tensors."""

    operation: Operation

    def __init__(self, construction: Construction, grouped: bool) -> None:
        super().__init__(construction)
        self.grouped = grouped
        self.fields = self._fields(construction)

    def _fields(self, construction: Construction) -> dict[str, Any]:
        """The arguments of :func:`submission.submit` that are attributes of the node."""
        return {}

    def _fields_of(self, context: Context) -> dict[str, Any]:
        """As :meth:`_fields`, with those that are inputs."""
        return self.fields

    @abstractmethod
    def _pair(self, context: Context, index: int) -> Pair:
        """The memory to read and the memory to write for a tensor."""

    @override
    def run(self, context: Context) -> None:
        if self.grouped:
            super().run(context)
            return
        engine = basics.engine()
        if not self.has_entered(engine):
            self.enter(engine)
        self.finish(context, engine, [self._submit(context, engine, self.name, wait=True)])

    @override
    def start(self, context: Context, engine: Engine, lane: Lane = FIRST) -> Sequence[Work]:
        name = self.name_in(lane)
        if not self.grouped:
            return [self._submit(context, engine, name, wait=False)]
        pairs = [self._pair(context, index) for index in range(context.inputs)]
        fields = self._fields_of(context)
        return submission.submit_group(self.operation, pairs, name, self.process_set, engine=engine, **fields)

    def _submit(self, context: Context, engine: Engine, name: str | None, wait: bool) -> Work:
        source, destination = self._pair(context, 0)
        fields = self._fields_of(context)
        where = self.process_set
        return submission.submit(self.operation, source, destination, name, where, wait=wait, engine=engine, **fields)


def _reduction(construction: Construction) -> dict[str, Any]:
    factors = (as_factor(construction.text(f"{when}scale_factor")) for when in ("pre", "post"))
    how = Reduction(ReduceOp(construction.integer("reduce_op")), *factors)
    return {"how": how, "tag": construction.integer("tag")}


class _OfOtherShape(CollectiveKernel):
    """The shape of an output depends on the tensors of all ranks.

    A rank may ask for memory before it knows the shape: it attempts what ran last, and others have other sizes now. So
    TensorFlow gets the memory of the result at the end.
    """

    def _pair(self, context: Context, index: int) -> Pair:
        source = context.input(index)
        return source, partial(context.candidate, index, source.dtype)

    @override
    def finish(self, context: Context, engine: Engine, works: Sequence[Work]) -> None:
        for index, work in enumerate(works):
            context.give(index, work.result())


class Allreduce(CollectiveKernel):
    """HorovodAllreduce, HorovodGroupedAllreduce."""

    operation = Operation.ALLREDUCE

    def _fields(self, construction: Construction) -> dict[str, Any]:
        return _reduction(construction)

    def _pair(self, context: Context, index: int) -> Pair:
        return context.same(index)


class Broadcast(CollectiveKernel):
    """HorovodBroadcast, HorovodGroupedBroadcast."""

    operation = Operation.BROADCAST

    def _fields(self, construction: Construction) -> dict[str, Any]:
        return {"root_rank": construction.integer("root_rank")}

    def _pair(self, context: Context, index: int) -> Pair:
        return context.same(index)


class Reducescatter(_OfOtherShape):
    """HorovodReducescatter, HorovodGroupedReducescatter."""

    operation = Operation.REDUCESCATTER

    def _fields(self, construction: Construction) -> dict[str, Any]:
        return _reduction(construction)


class Allgather(_OfOtherShape):
    """HorovodAllgather, HorovodGroupedAllgather."""

    operation = Operation.ALLGATHER

    def finish(self, context: Context, engine: Engine, works: Sequence[Work]) -> None:
        """The last output has a row for each tensor: the first of the rows of this rank in the result, their number.

        The gradient needs them.
        """
        super().finish(context, engine, works)
        position = engine.process_sets.ranks(self.process_set.process_set_id or 0).index(engine.topology.rank)
        places = context.output(len(works), (len(works), 2)).host.reshape(-1, 2)
        for place, work in zip(places, works, strict=True):
            place[:] = sum(work.received_splits[:position]), work.received_splits[position]


class Alltoall(_OfOtherShape):
    """HorovodAlltoall; the second input has the splits, or nothing for equal ones."""

    operation = Operation.ALLTOALL

    def _fields_of(self, context: Context) -> dict[str, Any]:
        return {"splits": tuple(context.input(1).host.tolist())}

    def finish(self, context: Context, engine: Engine, works: Sequence[Work]) -> None:
        """The second output has the number of rows that came from each member."""
        super().finish(context, engine, works)
        received = works[0].received_splits
        context.output(1, (len(received),)).host[:] = received
