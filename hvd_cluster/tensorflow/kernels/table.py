"""All ops: their definitions, under Horovod's names, and their kernels."""

from __future__ import annotations

from functools import partial

from hvd_cluster import basics
from hvd_cluster.tensorflow.kernels.collective import (
    Allgather,
    Allreduce,
    Alltoall,
    Broadcast,
    Collective,
    Reducescatter,
)
from hvd_cluster.tensorflow.kernels.entry import make_known
from hvd_cluster.tensorflow.kernels.members import Barrier, Join
from hvd_cluster.tensorflow.kernels.numbers import Number, NumberOfSet, is_included, size_of_set
from hvd_cluster.tensorflow.native import shapes
from hvd_cluster.tensorflow.native.registration import Definition
from hvd_cluster.tensorflow.tensors import ALLOWED

__all__ = ["make_all_known"]

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


def _collective(kind: type[Collective], definition: Definition) -> None:
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
    make_known(Definition("HorovodJoin", (), ("last_joined_rank: int32",), (SET,), shapes.scalar), Join)
    make_known(Definition("HorovodBarrier", (), (), PLACE, None), Barrier)
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
