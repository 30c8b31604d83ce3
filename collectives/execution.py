"""One batch -> one backend call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from collectives.adasum import adasum
from collectives.api import Operation, ReduceOp, Request
from collectives.backends.base import Backend
from collectives.messages import Response
from collectives.work import Work

__all__ = ["execute", "split_rows"]


def execute(works: Sequence[Work], responses: Sequence[Response], members: Sequence[int], backend: Backend) -> None:
    """Run the batch on ``backend`` and set the outputs; ``works[i]`` is what this rank submitted for each response.

    Works of a batch agree in everything that fusion compares. Raises what the backend raises.
    """
    if works[0].request.operation is Operation.ALLREDUCE:
        _allreduce(works, backend)
        return
    run = _RUN[works[0].request.operation]
    for work, response in zip(works, responses, strict=True):
        run(work, response, members, backend)


def _summed(request: Request, size: int) -> tuple[ReduceOp, float]:
    """The op and postscale for a backend, which knows no Average."""
    if request.op is ReduceOp.AVERAGE:
        return ReduceOp.SUM, request.postscale_factor / size
    return request.op, request.postscale_factor


def _allreduce(works: Sequence[Work], backend: Backend) -> None:
    request = works[0].request
    op, postscale = _summed(request, backend.size)
    sources = [work.input().host for work in works]
    destinations = [work.allocate(work.request.shape).host for work in works]
    if op is ReduceOp.ADASUM:
        adasum(backend, sources, destinations, request.dtype, request.prescale_factor, postscale)
    else:
        backend.allreduce(sources, destinations, request.dtype, op, request.prescale_factor, postscale)


def _allgather(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    request = work.request
    row = prod(request.shape[1:]) * request.dtype.itemsize
    output = work.allocate((sum(response.sizes), *request.shape[1:]))
    backend.allgather([work.input().bytes], [output.bytes], [rows * row for rows in response.sizes])


def _broadcast(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    output = work.allocate(work.request.shape)
    backend.broadcast(work.input().bytes, output.bytes, members.index(work.request.root_rank))


def _alltoall(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    request = work.request
    row = prod(request.shape[1:]) * request.dtype.itemsize
    work.received_splits = response.sizes[backend.rank :: backend.size]
    output = work.allocate((sum(work.received_splits), *request.shape[1:]))
    send = [rows * row for rows in request.splits]
    source = work.input().bytes[: sum(send)]
    backend.alltoall(source, output.bytes, send, [rows * row for rows in work.received_splits])


def _reducescatter(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    request = work.request
    op, postscale = _summed(request, backend.size)
    rows = split_rows(request.shape[0], backend.size)
    width = prod(request.shape[1:])
    output = work.allocate((rows[backend.rank], *request.shape[1:]))
    counts = [count * width for count in rows]
    sources, destinations = [work.input().host], [output.host]
    backend.reducescatter(sources, destinations, counts, request.dtype, op, request.prescale_factor, postscale)


def _barrier(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    backend.barrier()


_RUN: dict[Operation, Callable[[Work, Response, Sequence[int], Backend], None]] = {
    Operation.ALLGATHER: _allgather,
    Operation.BROADCAST: _broadcast,
    Operation.ALLTOALL: _alltoall,
    Operation.REDUCESCATTER: _reducescatter,
    Operation.BARRIER: _barrier,
}


def split_rows(rows: int, size: int) -> list[int]:
    """Rows for each member of a reducescatter: the first ``rows % size`` members get one more."""
    share, rest = divmod(rows, size)
    return [share + (member < rest) for member in range(size)]
