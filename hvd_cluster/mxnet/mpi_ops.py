"""All collectives, in Horovod's module of this name: ``from horovod.mxnet.mpi_ops import allreduce_``.

:mod:`hvd_cluster.ops` describes the arguments, the dtypes and the errors, which are MXNetErrors here. For MXNet:

allreduce and broadcast return at once. Their results are arrays of MXNet's engine as all others: whoever reads one
waits, and gets the error if there is one. ``priority``: of those that may start, the highest one starts first.
allgather, alltoall and reducescatter wait, because the shape of the result depends on the other ranks.
Tensors are NDArrays or ``mx.np`` arrays in host memory. Nothing is recorded for autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from collectives import HorovodInternalError, Operation, ReduceOp
from hvd_cluster import common_api as _common_api
from hvd_cluster.common_api import *  # noqa: F403
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.mxnet.arrays import Array, NDArray, checked, combined, is_sparse, may_be_blocked, resized, with_splits
from hvd_cluster.mxnet.nodes import NodeCall, calling
from hvd_cluster.ops.arguments import Max, Min, Product, Reduction, as_group, as_rank, as_splits, reduction
from hvd_cluster.ops.submission import run, start_group, synchronize

__all__ = ["HorovodInternalError", "Max", "Min", "Product", "allgather", "allreduce", "allreduce_", "alltoall"]
__all__ += ["broadcast", "broadcast_", "grouped_allgather", "grouped_allreduce", "grouped_allreduce_"]
__all__ += ["grouped_reducescatter", "reducescatter", *_common_api.__all__]
Name: TypeAlias = str | None


def allreduce(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Array:
    """Combine ``tensor`` over all ranks, element by element, into a new array of the same shape.

    A row_sparse array (Average or Sum) gets the rows of all ranks; that waits.
    """
    with calling(Operation.ALLREDUCE, name, process_set) as label:
        how = _reduction(average, op, prescale_factor, postscale_factor)
        if is_sparse(tensor):
            return combined(tensor, label, process_set, how)
        copy = checked(tensor).copy()
        NodeCall(Operation.ALLREDUCE, [copy], label, process_set, how).push(priority)
        return copy


def allreduce_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Array:
    """Combine ``tensor`` over all ranks, in place; returns it."""
    with calling(Operation.ALLREDUCE, name, process_set) as label:
        how = _reduction(average, op, prescale_factor, postscale_factor)
        if is_sparse(tensor):
            combined(tensor, label, process_set, how).copyto(tensor)
        else:
            _overwrite(Operation.ALLREDUCE, tensor, label, priority, process_set, how=how)
        return tensor


def grouped_allreduce(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Sequence[Array]:
    """Combine each tensor over all ranks, into new arrays."""
    with calling(Operation.ALLREDUCE, name, process_set, tensors) as label:
        how = _reduction(average, op, prescale_factor, postscale_factor)
        copies = [tensor.copy() for tensor in as_group(tensors, NDArray, checked)]
        NodeCall(Operation.ALLREDUCE, copies, label, process_set, how, is_alone=False).push(priority)
        return copies


def grouped_allreduce_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
) -> Sequence[Array]:
    """Combine each tensor over all ranks, in place; returns ``tensors``."""
    # By copies: two of the arrays may be slices of one, whose nodes would wait for each other.
    results = grouped_allreduce(tensors, average, name, priority, prescale_factor, postscale_factor, process_set, op)
    for result, tensor in zip(results, tensors, strict=True):
        result.copyto(tensor)
    return tensors


def broadcast(
    tensor: Array, root_rank: int, name: Name = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Array:
    """The root's tensor, as a new array on every rank; all give an array of the same shape."""
    with calling(Operation.BROADCAST, name, process_set) as label:
        copy, root = checked(tensor).copy(), as_rank(root_rank)
        NodeCall(Operation.BROADCAST, [copy], label, process_set, root_rank=root).push(priority)
        return copy


def broadcast_(
    tensor: Array, root_rank: int, name: Name = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Array:
    """Overwrite ``tensor`` with the root's on every rank; returns it."""
    with calling(Operation.BROADCAST, name, process_set) as label:
        _overwrite(Operation.BROADCAST, tensor, label, priority, process_set, root_rank=as_rank(root_rank))
        return tensor


def allgather(
    tensor: Array, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Array:
    """Concatenate the tensors of all ranks in rank order; only the first dimensions may differ."""
    with calling(Operation.ALLGATHER, name, process_set) as label:
        return run(Operation.ALLGATHER, resized, tensor, label, process_set)


def grouped_allgather(
    tensors: Sequence[Array], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Concatenate each tensor of all ranks in rank order; only the first dimensions may differ."""
    with calling(Operation.ALLGATHER, name, process_set, tensors) as label:
        return _run_group(Operation.ALLGATHER, tensors, label, process_set)


def alltoall(
    tensor: Array,
    splits: Any = None,
    name: Name = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send ``splits[r]`` consecutive rows to each rank r, and concatenate the received rows in rank order.

    Without ``splits``, equal shares; with them the result is (array, received_splits), the latter int32.
    """
    with calling(Operation.ALLTOALL, name, process_set) as label:
        sizes = as_splits(splits.asnumpy() if isinstance(splits, NDArray) else splits)
        result = run(Operation.ALLTOALL, with_splits, tensor, label, process_set, splits=sizes)
        return result[0] if splits is None else result


def reducescatter(
    tensor: Array,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Combine ``tensor`` (Average or Sum) over all ranks and keep this rank's rows.

    The first ``shape[0] % size`` ranks get one row more than the others.
    """
    with calling(Operation.REDUCESCATTER, name, process_set) as label:
        how = reduction(None, op, prescale_factor, postscale_factor)
        return run(Operation.REDUCESCATTER, resized, tensor, label, process_set, how)


def grouped_reducescatter(
    tensors: Sequence[Array],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Combine each tensor (Average or Sum) over all ranks and keep this rank's rows of each."""
    with calling(Operation.REDUCESCATTER, name, process_set, tensors) as label:
        how = reduction(None, op, prescale_factor, postscale_factor)
        return _run_group(Operation.REDUCESCATTER, tensors, label, process_set, how)


def _reduction(average: bool | None, op: ReduceOp | None, prescale_factor: Any, postscale_factor: Any) -> Reduction:
    """A function of its own, because a warning counts the calls to the user's line."""
    return reduction(average, op, prescale_factor, postscale_factor)


def _overwrite(
    operation: Operation, tensor: Array, label: str, priority: int, process_set: ProcessSet, **fields: Any
) -> None:
    """By a copy, where the node might not find the memory of the array."""
    target = checked(tensor).copy() if may_be_blocked(checked(tensor)) else tensor
    NodeCall(operation, [target], label, process_set, **fields).push(priority)
    if target is not tensor:
        target.copyto(tensor)


def _run_group(operation: Operation, tensors: Any, label: str, process_set: ProcessSet, *how: Reduction) -> list[Array]:
    arrays = as_group(tensors, NDArray, checked)
    results: list[Array] = synchronize(start_group(operation, resized, arrays, list, label, process_set, *how))
    return results
