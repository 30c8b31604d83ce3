"""Collectives on groups of torch tensors: all of a group run together, or none.

Arguments are those of :mod:`hvd_cluster.torch.operations`, with a list of tensors in the place of one. A group of
``name`` keys its n tensors as name_1ofn to name_nofn. A group's tensors may differ in dtype; when the ranks disagree
about one of them, all fail, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from collectives.api import InvalidRequestError, Operation, ReduceOp
from hvd_cluster.operations import as_factor, choose_op, start_group
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.compression import Compression, Compressor, require_compressor
from hvd_cluster.torch.operations import Handle, HandleGroup, output, same_shape, synchronize
from hvd_cluster.torch.tensors import allocator, as_input, to_buffer

__all__ = [
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
]

Tensors = Sequence[torch.Tensor]


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        raise InvalidRequestError("a group is a list of tensors, not one tensor; use the function for one, or [tensor]")
    listed = list(tensors)
    if not listed:
        raise InvalidRequestError("a group needs at least one tensor")
    return listed


def _start_allreduce(
    tensors: Tensors,
    inplace: bool,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    kind: Callable[[Iterable[Any]], Any] = list,
) -> HandleGroup:
    parts = [same_shape(tensor, inplace) for tensor in _listed(tensors)]
    works = start_group(
        Operation.ALLREDUCE,
        [(source, target) for source, target, _ in parts],
        name,
        process_set,
        op=choose_op(average, op),
        prescale_factor=as_factor(prescale_factor),
        postscale_factor=as_factor(postscale_factor),
    )
    finishes = (finish for _, _, finish in parts)
    return HandleGroup([Handle(work, finish) for work, finish in zip(works, finishes, strict=True)], kind)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleGroup:
    """Start combining each tensor over all ranks, into new tensors."""
    return _start_allreduce(tensors, False, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> HandleGroup:
    """Start combining each tensor over all ranks, in place."""
    return _start_allreduce(tensors, True, average, name, op, prescale_factor, postscale_factor, process_set, tuple)


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Combine each tensor over all ranks, element by element; returns new tensors of the same shapes."""
    small, contexts = _compress(compression, tensors)
    handle = grouped_allreduce_async(small, average, name, op, prescale_factor, postscale_factor, process_set)
    return _decompress(compression, synchronize(handle), contexts)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Combine each tensor over all ranks, in place."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    results: tuple[torch.Tensor, ...] = synchronize(handle)
    return results


def _compress(compression: type[Compressor], tensors: Tensors) -> tuple[list[torch.Tensor], list[Any]]:
    require_compressor(compression)
    pairs = [compression.compress(tensor) for tensor in _listed(tensors)]
    return [small for small, _ in pairs], [context for _, context in pairs]


def _decompress(
    compression: type[Compressor], results: Sequence[torch.Tensor], contexts: Sequence[Any]
) -> list[torch.Tensor]:
    return [compression.decompress(result, context) for result, context in zip(results, contexts, strict=True)]


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> HandleGroup:
    """Start concatenating each tensor of all ranks along the first dimension."""
    sources = [as_input(tensor) for tensor in _listed(tensors)]
    parts = [(to_buffer(source), allocator(source)) for source in sources]
    works = start_group(Operation.ALLGATHER, parts, name, process_set)
    return HandleGroup([Handle(work, output) for work in works], tuple)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[torch.Tensor, ...]:
    """Concatenate each tensor of all ranks in rank order; only the first dimensions may differ."""
    results: tuple[torch.Tensor, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return results


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> HandleGroup:
    """Start combining each tensor over all ranks and keeping this rank's rows."""
    sources = [as_input(tensor) for tensor in _listed(tensors)]
    works = start_group(
        Operation.REDUCESCATTER,
        [(to_buffer(source), allocator(source)) for source in sources],
        name,
        process_set,
        op=choose_op(None, op),
        prescale_factor=as_factor(prescale_factor),
        postscale_factor=as_factor(postscale_factor),
    )
    return HandleGroup([Handle(work, output) for work in works], list)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Combine each tensor (Average or Sum) over all ranks and keep this rank's rows of each."""
    small, contexts = _compress(compression, tensors)
    handle = grouped_reducescatter_async(small, name, op, process_set, prescale_factor, postscale_factor)
    return _decompress(compression, synchronize(handle), contexts)
