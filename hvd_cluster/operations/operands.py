"""Tensors on their way into the engine: a binding describes each of its tensors as an :class:`Operand`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from collectives.api import InvalidRequestError, Operation
from collectives.buffers import Buffer
from collectives.engine.work import Destination
from hvd_cluster.operations import submission
from hvd_cluster.operations.handles import Finish, Handle, HandleGroup, Kind
from hvd_cluster.process_sets import ProcessSet

__all__ = ["Describe", "Operand", "run", "start", "start_group"]


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
    operand = _described(describe, tensor, operation, name, process_set)
    work = submission.start(operation, operand.source, operand.destination, name, process_set, **fields)
    return Handle(work, operand.finish)


def run(
    operation: Operation, describe: Describe, tensor: Any, name: str | None, process_set: ProcessSet, **fields: Any
) -> Any:
    """Submit one tensor, wait, and return the user's result."""
    operand = _described(describe, tensor, operation, name, process_set)
    work = submission.start(operation, operand.source, operand.destination, name, process_set, wait=True, **fields)
    return operand.finish(work)


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Sequence[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results."""
    count = len(tensors)
    operands = [
        _described(describe, each, operation, name, process_set, number, count)
        for number, each in enumerate(tensors, start=1)
    ]
    pairs = [(operand.source, operand.destination) for operand in operands]
    works = submission.start_group(operation, pairs, name, process_set, **fields)
    return HandleGroup([Handle(work, operand.finish) for work, operand in zip(works, operands, strict=True)], kind)


def _described(
    describe: Describe,
    tensor: Any,
    operation: Operation,
    name: str | None,
    process_set: ProcessSet,
    number: int = 0,
    count: int = 0,
) -> Operand:
    """The operand of ``tensor``, the ``number``-th in a group of ``count``; an error names operation and tensor.

    The other ranks get that error, too, because they may wait for this rank.
    """
    try:
        return describe(tensor)
    except InvalidRequestError as error:
        label = "" if name is None else f" {name!r}"
        member = f", tensor {number} of the group" if number else ""
        explained = InvalidRequestError(f"{operation.label}{label}{member}: {error}")
        submission.refuse(operation, name, process_set, count, explained)
        raise explained from error.__cause__
