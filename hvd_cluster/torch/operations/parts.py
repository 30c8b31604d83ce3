"""A tensor's part in an operation: what is read, what is written, and what the user gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch

from collectives.api import InvalidRequestError, Operation
from collectives.buffers import Buffer
from collectives.engine.work import Destination, Work
from hvd_cluster import operations
from hvd_cluster.process_sets import ProcessSet
from hvd_cluster.torch.operations.compilation import uncompiled
from hvd_cluster.torch.operations.handles import Finish, Handle, HandleGroup, Kind
from hvd_cluster.torch.tensors import (
    allocator,
    as_input,
    memory_format,
    require_tensor,
    require_writable,
    to_buffer,
)

__all__ = [
    "in_place",
    "listed",
    "of_other_shape",
    "of_same_shape",
    "run",
    "start",
    "start_group",
    "with_splits",
]


class Part(NamedTuple):
    """One tensor in an operation; ``finish`` turns the finished work into what the user gets."""

    source: Buffer
    destination: Destination
    finish: Finish


PartOf: TypeAlias = Callable[[torch.Tensor], Part]


def in_place(tensor: torch.Tensor) -> Part:
    """The result overwrites ``tensor``, which autograd gets to know, in case it was saved for backward."""
    source = as_input(tensor)
    require_writable(tensor)
    buffer = to_buffer(source)

    def finish(work: Work) -> torch.Tensor:
        if source.data_ptr() != tensor.data_ptr():
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(source)
        elif not tensor.is_inference():  # which has no version
            torch.autograd.graph.increment_version(tensor)
        return tensor

    return Part(buffer, buffer, finish)


def of_same_shape(tensor: torch.Tensor) -> Part:
    """The result is a new tensor of the shape of ``tensor``."""
    source = as_input(tensor)
    return Part(to_buffer(source), to_buffer(torch.empty_like(source)), _output_like(tensor))


def of_other_shape(tensor: torch.Tensor) -> Part:
    """The result is a new tensor with as many rows as it turns out to need."""
    source = as_input(tensor)
    return Part(to_buffer(source), allocator(source), _output_like(tensor))


def _output(work: Work) -> torch.Tensor:
    tensor: torch.Tensor = work.result().owner
    return tensor


def _output_like(tensor: torch.Tensor) -> Finish:
    form = memory_format(tensor)
    if form is torch.contiguous_format:
        return _output
    return lambda work: _output(work).contiguous(memory_format=form)


def with_splits(tensor: torch.Tensor) -> Part:
    """The result is a pair: that of other shape, and how many of its rows came from each member, in int32."""
    part = of_other_shape(tensor)

    def finish(work: Work) -> tuple[Any, torch.Tensor]:
        return part.finish(work), torch.tensor(work.received_splits, dtype=torch.int32)

    return part._replace(finish=finish)


def _prepared(
    part_of: PartOf, tensor: torch.Tensor, operation: Operation, name: str | None, place: int | None = None
) -> Part:
    """The part of ``tensor``, which is number ``place`` of a group; a refusal says which one it is."""
    try:
        return part_of(tensor)
    except InvalidRequestError as error:
        label = "" if name is None else f" {name!r}"
        member = "" if place is None else f", tensor {place} of the group"
        raise InvalidRequestError(f"{operation.value}{label}{member}: {error}") from error.__cause__


@uncompiled
def start(
    operation: Operation,
    part_of: PartOf,
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> Handle:
    """Submit one tensor. ``fields`` are those of a request."""
    part = _prepared(part_of, tensor, operation, name)
    return Handle(operations.start(operation, part.source, part.destination, name, process_set, **fields), part.finish)


@uncompiled
def run(
    operation: Operation,
    part_of: PartOf,
    tensor: torch.Tensor,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> Any:
    """Submit one tensor, wait, and give the user the result."""
    part = _prepared(part_of, tensor, operation, name)
    work = operations.start(operation, part.source, part.destination, name, process_set, wait=True, **fields)
    return part.finish(work)


@uncompiled
def start_group(
    operation: Operation,
    part_of: PartOf,
    tensors: Iterable[torch.Tensor],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> HandleGroup:
    """Submit a group, whose results come in ``kind``."""
    parts = [
        _prepared(part_of, tensor, operation, name, place) for place, tensor in enumerate(listed(tensors), start=1)
    ]
    pairs = [(part.source, part.destination) for part in parts]
    works = operations.start_group(operation, pairs, name, process_set, **fields)
    return HandleGroup([Handle(work, part.finish) for work, part in zip(works, parts, strict=True)], kind)


def listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a group; InvalidRequestError where there is none."""
    if isinstance(tensors, torch.Tensor):
        raise InvalidRequestError("a group is a list of tensors, not one tensor; use the function for one, or [tensor]")
    result = [require_tensor(tensor) for tensor in tensors]
    if not result:
        raise InvalidRequestError("a group needs at least one tensor")
    return result
