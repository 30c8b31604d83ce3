"""Tensors on their way into the engine: a binding describes each of its tensors as an :class:`Operand`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from collectives.api import InvalidRequestError, Operation
from collectives.buffers import Buffer
from collectives.engine.work import Destination
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import process_set_id
from hvd_cluster.ops.handles import Finish, Handle, HandleGroup, Kind


class Operand(NamedTuple):
    """One tensor of an operation: the memory to read, the memory to write, and how the user's result is made of it."""

    source: Buffer
    destination: Destination
    finish: Finish


Describe: TypeAlias = Callable[[Any], Operand]
"""The operand of a framework's tensor; InvalidRequestError for a tensor that cannot travel."""


def start(
    operation: Operation, describe: Describe, tensor: Any, name: str | None, process_set: ProcessSet, **fields: Any
) -> Handle:
    """Submit one tensor. ``fields`` are those of a request."""
    operand = _described(describe, tensor, operation, name)
    work = submission.start(operation, operand.source, operand.destination, name, process_set, **fields)
    return Handle(work, operand.finish)


def run(
    operation: Operation, describe: Describe, tensor: Any, name: str | None, process_set: ProcessSet, **fields: Any
) -> Any:
    """Submit one tensor, wait, and return the user's result."""
    try:
        source, destination, finish = describe(tensor)
    except InvalidRequestError as error:
        raise _named(error, operation, name) from error.__cause__
    return finish(submission.start(operation, source, destination, name, process_set, wait=True, **fields))


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Sequence[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results. One of no tensors is done: nothing travels."""
    if not tensors:
        return HandleGroup((), kind)
    operands = [_described(describe, each, operation, name, number) for number, each in enumerate(tensors, start=1)]
    pairs = [(operand.source, operand.destination) for operand in operands]
    works = submission.start_group(operation, pairs, name, process_set, **fields)
    return HandleGroup([Handle(work, operand.finish) for work, operand in zip(works, operands, strict=True)], kind)


def _described(
    describe: Describe, tensor: Any, operation: Operation, name: str | None, number: int | None = None
) -> Operand:
    """The operand of ``tensor``, the ``number``-th of a group; an error names the operation and the tensor."""
    try:
        return describe(tensor)
    except InvalidRequestError as error:
        raise _named(error, operation, name, number) from error.__cause__


def _named(
    error: InvalidRequestError, operation: Operation, name: str | None, number: int | None = None
) -> InvalidRequestError:
    label = "" if name is None else f" {name!r}"
    member = "" if number is None else f", tensor {number} of the group"
    return InvalidRequestError(f"{operation.value}{label}{member}: {error}")


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member has called it, or has joined."""
    basics.engine().barrier(process_set_id(process_set))


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Return the global rank that joined last, when all members have joined; for ranks that run out of data first.

    Until then this rank takes part in the operations of the others, without data: zeros for a sum or an average (which
    still divides by the full size), no rows for allgather and alltoall, and the neutral element for Min, Max and
    Product. A broadcast must not come from it. ``device`` is accepted for compatibility: -1, or the number of a GPU.
    """
    return basics.engine().join(process_set_id(process_set))
