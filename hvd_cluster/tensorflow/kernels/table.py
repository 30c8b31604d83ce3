"""All ops: their definitions, under Horovod's names, and their kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hvd_cluster.core import basics
from hvd_cluster.tensorflow.kernels.collective import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    CollectiveKernel,
    Reducescatter,
)
from hvd_cluster.tensorflow.kernels.entry import make_known
from hvd_cluster.tensorflow.kernels.node import BarrierKernel, JoinKernel
from hvd_cluster.tensorflow.native import shapes
from hvd_cluster.tensorflow.native.context import Context
from hvd_cluster.tensorflow.native.registration import Construction, Definition
from hvd_cluster.tensorflow.tensors import ALLOWED


def size_of_set(id: int) -> int:
    """The number of members; InvalidRequestError for an unknown id."""
    return len(basics.engine().process_sets.ranks(id)) if id else basics.size()


def is_included(id: int) -> int:
    """1 if this rank is a member, else 0; InvalidRequestError for an unknown id."""
    engine = basics.engine()
    return int(engine.topology.rank in engine.process_sets.ranks(id))


class Number:
    """A node whose output is the value of a function."""

    def __init__(self, function: Callable[[], int], construction: Construction) -> None:
        self._function = function

    def run(self, context: Context) -> None:
        """Set the output."""
        value = self._function()
        context.output(0, ()).host[0] = value


class NumberOfSet(Number):
    """As :class:`Number`, of a process set."""

    def __init__(self, function: Callable[[int], int], construction: Construction) -> None:
        id = construction.integer("process_set_id")
        super().__init__(lambda: function(id), construction)


TYPE = f"T: {{{ALLOWED}}}"
TYPES = f"T: list({{{ALLOWED}}}) >= 1"
SET = "process_set_id: int = 0"
PLACE = (
    "tensor_name: string = ''",
    "node_name: string = ''",
    "naming: int = 0",
    "roster: int = 0",
    "tag: int = 0",
    SET,
)
# Texts, because an attribute of the type float has 32 bits.
REDUCTION = ("reduce_op: int = 1", "prescale_factor: string = '1.0'", "postscale_factor: string = '1.0'")
ROWS = "rows: int64"
NUMBER = ("number: int32",)


def _collective(kind: type[CollectiveKernel], definition: Definition) -> None:
    make_known(definition, partial(kind, grouped="Grouped" in definition.name))


def _single(name: str, output: str, attributes: tuple[str, ...], shape: shapes.Function) -> Definition:
    return Definition(name, ("tensor: T",), (f"{output}: T",), (TYPE, *PLACE, *attributes), shape)


def _group(name: str, output: str, attributes: tuple[str, ...], shape: shapes.Function) -> Definition:
    return Definition(name, ("tensors: T",), (f"{output}: T",), (TYPES, *PLACE, *attributes), shape)


def _gathering(definition: Definition) -> Definition:
    outputs = (*definition.outputs, ROWS)
    return Definition(definition.name, definition.inputs, outputs, definition.attributes, definition.shape)


def make_all_known() -> None:
    """Register the ops; once in a process."""
    _make_collectives_known()
    make_known(Definition("HorovodJoin", (), ("last_joined_rank: int32",), (SET,), shapes.scalar), JoinKernel)
    make_known(Definition("HorovodBarrier", (), (), PLACE, None), BarrierKernel)
    for name, function in {"Rank": basics.rank, "LocalRank": basics.local_rank, "LocalSize": basics.local_size}.items():
        make_known(Definition(f"Horovod{name}", (), NUMBER, (), shapes.scalar), partial(Number, function))
    for name, of_set in {"Size": size_of_set, "ProcessSetIncluded": is_included}.items():
        make_known(Definition(f"Horovod{name}", (), NUMBER, (SET,), shapes.scalar), partial(NumberOfSet, of_set))


def _make_collectives_known() -> None:
    same, rows = shapes.same, shapes.other_rows
    _collective(Allreduce, _single("HorovodAllreduce", "sum", REDUCTION, same))
    _collective(Allreduce, _group("HorovodGroupedAllreduce", "sums", REDUCTION, same))
    _collective(Broadcast, _single("HorovodBroadcast", "output", ("root_rank: int",), same))
    _collective(Broadcast, _group("HorovodGroupedBroadcast", "outputs", ("root_rank: int",), same))
    _collective(Allgather, _gathering(_single("HorovodAllgather", "output", (), shapes.gathered)))
    _collective(Allgather, _gathering(_group("HorovodGroupedAllgather", "outputs", (), shapes.gathered)))
    _collective(Reducescatter, _single("HorovodReducescatter", "output", REDUCTION, rows))
    _collective(Reducescatter, _group("HorovodGroupedReducescatter", "outputs", REDUCTION, rows))
    inputs, outputs = ("tensor: T", "splits: int32"), ("output: T", "received_splits: int32")
    _collective(Alltoall, Definition("HorovodAlltoall", inputs, outputs, (TYPE, *PLACE), shapes.rows_and_vector))
