"""Allgather: the tensors of all ranks, one after the other along the first dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives import Operation, ReduceOp
from hvd_cluster.comparison.rosters import Roster
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import Reduction, as_group
from hvd_cluster.ops.backward import of_group
from hvd_cluster.tensorflow.operations.attributes import (
    backward_naming,
    collective,
    gradient_of,
    reduction_attributes,
    set_attribute,
    set_of,
)
from hvd_cluster.tensorflow.operations.calls import call
from hvd_cluster.tensorflow.tensors import as_bits, is_continuous
from hvd_cluster.tensorflow.xla.scope import CompiledNode

_AVERAGE = reduction_attributes(Reduction(ReduceOp.AVERAGE))


@collective(Operation.ALLGATHER)
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks in rank order; only the first dimensions may differ."""
    bits, restore = as_bits(tensor)
    where = set_attribute(process_set)
    return restore(call("HorovodAllgather", {"tensor": bits}, where, name, ignore_name_scope)[0])


@gradient_of("HorovodAllgather")
def _gradient(op: Any, gradient: tf.Tensor, _: Any) -> tf.Tensor:
    """The gradients are averaged over the ranks; each rank keeps the rows that it contributed."""
    how = {**_AVERAGE, **set_of(op)}
    return _own_rows(call("HorovodAllreduce", {"tensor": gradient}, how, **backward_naming(op)), op, 0)


def _own_rows(average: tf.Tensor, op: Any, index: int) -> tf.Tensor:
    if isinstance(op, CompiledNode):
        return op.own_rows(average, index)
    place = op.outputs[-1][index]
    return average[place[0] : place[0] + place[1]]


@collective(Operation.ALLGATHER, group=0)
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Concatenate each tensor of all ranks in rank order; only the first dimensions may differ."""
    return _grouped_allgather(tensors, name, ignore_name_scope, process_set)


def _grouped_allgather(
    tensors: Sequence[Any],
    name: str | None,
    ignore_name_scope: bool,
    process_set: ProcessSet,
    roster: Roster | None = None,
) -> list[tf.Tensor]:
    """As :func:`grouped_allgather`. ``roster``: see :func:`call`."""
    pairs = as_group(tensors, tf.Tensor, as_bits)
    if not pairs:
        return []
    inputs, where = {"tensors": [bits for bits, _ in pairs]}, set_attribute(process_set)
    results = call("HorovodGroupedAllgather", inputs, where, name, ignore_name_scope, roster=roster)[0]
    return [restore(result) for result, (_, restore) in zip(results, pairs, strict=True)]


@gradient_of("HorovodGroupedAllgather")
def _grouped_gradient(op: Any, *gradients: tf.Tensor) -> Sequence[tf.Tensor | None]:
    how = {**_AVERAGE, **set_of(op)}

    def backward(given: list[tf.Tensor]) -> list[tf.Tensor]:
        results: list[tf.Tensor] = call("HorovodGroupedAllreduce", {"tensors": given}, how, **backward_naming(op))
        return results

    averages = of_group(gradients[:-1], is_continuous, backward)
    return [None if each is None else _own_rows(each, op, index) for index, each in enumerate(averages)]
