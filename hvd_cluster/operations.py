"""What a collective is before a framework touches it: arguments -> request -> work. Shared by all bindings."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Sequence
from typing import Any

from collectives.api import InvalidRequestError, Operation, ReduceOp, Request
from collectives.buffers import Buffer
from collectives.engine.work import Destination, Work
from hvd_cluster import basics
from hvd_cluster.process_sets import ProcessSet

__all__ = ["as_factor", "choose_op", "process_set_id", "reduction", "start", "start_group", "whole_splits"]


def reduction(
    average: bool | None, op: ReduceOp | int | None, prescale_factor: Any, postscale_factor: Any
) -> dict[str, Any]:
    """The fields of a :class:`Request` that say how elements are combined; Average is the default.

    Called by the function that the user called, so that a warning points to the user's line. InvalidRequestError when
    both ``op`` and the deprecated ``average`` are given, for an op that is not one of ours, and for factors that are no
    numbers.
    """
    return {
        "op": choose_op(average, op),
        "prescale_factor": as_factor(prescale_factor),
        "postscale_factor": as_factor(postscale_factor),
    }


def choose_op(average: bool | None, op: ReduceOp | int | None) -> ReduceOp:
    """The op of :func:`reduction`, which calls this in the place of the user's function."""
    if average is not None:
        if op is not None:
            raise InvalidRequestError("give op= or the deprecated average=, not both")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=4)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    try:
        return ReduceOp.AVERAGE if op is None else ReduceOp(op)
    except ValueError:
        allowed = ", ".join(member.name.capitalize() for member in ReduceOp)
        raise InvalidRequestError(f"op={op!r} is not a reduction; use one of {allowed}") from None


def process_set_id(process_set: ProcessSet) -> int:
    """The id of a registered set; InvalidRequestError otherwise."""
    basics.engine()
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"process_set={process_set!r} is not a ProcessSet; make one with ProcessSet([ranks])")
    if process_set.process_set_id is None:
        raise InvalidRequestError(f"{process_set} is not registered; give it to init(process_sets=[...])")
    return process_set.process_set_id


def whole_splits(splits: Sequence[int] | None, rows: int, process_set: ProcessSet) -> tuple[int, ...]:
    """``splits`` as a tuple, or equal shares of ``rows``; InvalidRequestError when these do not come out even."""
    if splits is not None:
        return tuple(splits)
    size = process_set.size() or 1
    if rows % size:
        raise InvalidRequestError(
            f"alltoall without splits needs rows that {size} ranks can share evenly, not {rows}; give splits"
        )
    return (rows // size,) * size


def _as_rank(root_rank: Any) -> int:
    try:
        return operator.index(root_rank)
    except TypeError:
        raise InvalidRequestError(f"root_rank={root_rank!r} must be an integer, the global rank of the root") from None


def as_factor(value: Any) -> float:
    """A scale factor as a float; InvalidRequestError for what is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"a scale factor of {value!r} is not allowed; give a finite number") from None


def start(
    operation: Operation,
    source: Buffer,
    destination: Destination,
    name: str | None,
    process_set: ProcessSet,
    wait: bool = False,
    **fields: Any,
) -> Work:
    """Submit ``source``; with ``wait`` return the finished work. ``fields`` are those of :class:`Request`."""
    engine = basics.engine()
    if "root_rank" in fields:
        fields["root_rank"] = _as_rank(fields["root_rank"])
    request = Request(
        operation.value if name is None else f"{operation.value}.{name}",
        operation,
        source.dtype,
        source.shape,
        process_set=process_set_id(process_set),
        device=source.device,
        **fields,
    )
    call = engine.run if wait else engine.submit
    return call(request, source, destination, unnamed=name is None)


def start_group(
    operation: Operation,
    tensors: Sequence[tuple[Buffer, Destination]],
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> list[Work]:
    """Submit sources with their destinations as a group: all run together, or none."""
    engine = basics.engine()
    id, label, count = process_set_id(process_set), f"grouped_{operation.value}", len(tensors)
    if name is not None:
        label = f"{operation.value}.{name}"
    works = []
    for place, (source, destination) in enumerate(tensors, start=1):
        request = Request(
            f"{label}_{place}of{count}",
            operation,
            source.dtype,
            source.shape,
            process_set=id,
            device=source.device,
            group=f"{label}_of{count}",
            group_size=count,
            **fields,
        )
        works.append(Work(request, source, destination))
    engine.submit_group(works, unnamed=name is None)
    return works
