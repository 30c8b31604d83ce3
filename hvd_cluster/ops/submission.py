"""From a tensor and its checked arguments to a request of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from collectives.api import Operation, Request
from collectives.buffers import Buffer
from collectives.engine.engine import Engine
from collectives.engine.work import Destination, Work
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops.arguments import as_rank, process_set_id

KEPT_REQUESTS = 1 << 12

LONGEST_KEPT = 512
"""The largest number of characters of a name, plus the number of splits, of a request that is kept.

Longer ones are mostly alltoalls on many ranks, with other splits each time: to keep them would only take memory.
"""


class _NotKeptError(Exception):
    """Carries a ``request`` that is too long to be kept past the cache, which keeps no errors."""

    def __init__(self, request: Request) -> None:
        self.request = request


@lru_cache(maxsize=KEPT_REQUESTS)
def _request(*args: Any, **fields: Any) -> Request:
    """Calls repeat from step to step: to find their request is faster than to make it.

    The engine then knows it by identity. Raises _NotKeptError.
    """
    request = Request(*args, **fields)
    if len(request.name) + len(request.splits) > LONGEST_KEPT:
        raise _NotKeptError(request)
    return request


def label_of(operation: Operation, name: Any, group: bool = False) -> str:
    """The name in the engine of an operation or group called ``name``; without one, its kind, which gets a number."""
    if name is None:
        return f"grouped_{operation.label}" if group else operation.label
    return f"{operation.label}.{name}"


def start(
    operation: Operation,
    source: Buffer,
    destination: Destination,
    name: str | None,
    process_set: ProcessSet,
    wait: bool = False,
    engine: Engine | None = None,
    **fields: Any,
) -> Work:
    """Submit ``source``; with ``wait`` return the finished work. ``fields`` are those of :class:`Request`.

    ``engine``: that of the caller, by default the present one.
    """
    engine = engine or basics.engine()
    if "root_rank" in fields:
        fields["root_rank"] = as_rank(fields["root_rank"])
    try:
        request = _request(
            label_of(operation, name),
            operation,
            source.dtype,
            source.shape,
            process_set=process_set_id(process_set),
            device=source.device,
            **fields,
        )
    except _NotKeptError as error:
        request = error.request
    call = engine.run if wait else engine.submit
    return call(request, source, destination, unnamed=name is None)


def start_group(
    operation: Operation,
    tensors: Sequence[tuple[Buffer, Destination]],
    name: str | None,
    process_set: ProcessSet,
    engine: Engine | None = None,
    **fields: Any,
) -> list[Work]:
    """As :func:`start`, without a wait: sources with their destinations as a group. All run together, or none."""
    engine = engine or basics.engine()
    id, label, count = process_set_id(process_set), label_of(operation, name, group=True), len(tensors)
    works = []
    for index, (source, destination) in enumerate(tensors):
        try:
            request = _request(
                f"{label}[{index}]",
                operation,
                source.dtype,
                source.shape,
                process_set=id,
                device=source.device,
                group=label,
                group_size=count,
                **fields,
            )
        except _NotKeptError as error:
            request = error.request
        works.append(Work(request, source, destination))
    engine.submit_group(works, unnamed=name is None)
    return works
