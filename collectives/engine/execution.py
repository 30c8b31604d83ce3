"""One batch -> one backend call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from collectives.api import DType, Operation, ReduceOp, Request
from collectives.backends.adasum import adasum
from collectives.backends.base import Array, Backend, Bytes
from collectives.engine.work import Work
from collectives.kernels.reduction import INTEGERS
from collectives.planning.messages import Response

__all__ = ["execute", "split_rows"]


def execute(works: Sequence[Work], responses: Sequence[Response], members: Sequence[int], backend: Backend) -> None:
    """Run the batch on ``backend`` and set the outputs; ``works[i]`` is what this rank submitted for each response.

    Works of a batch agree in everything that fusion compares. Raises what the backend raises.
    """
    operation = works[0].request.operation
    if operation in _RUN_FUSED:
        _RUN_FUSED[operation](works, responses, backend)
        return
    for work, response in zip(works, responses, strict=True):
        _RUN[operation](work, response, members, backend)


def _summed(request: Request, size: int) -> tuple[ReduceOp, float]:
    """The op and postscale for a backend, which knows Average for integers only."""
    if request.op is ReduceOp.AVERAGE and request.dtype not in INTEGERS:
        return ReduceOp.SUM, request.postscale_factor / size
    return request.op, request.postscale_factor


def _allreduce(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> None:
    request = works[0].request
    op, postscale = _summed(request, backend.size)
    sources = [work.input().host for work in works]
    destinations = [work.allocate(work.request.shape).host for work in works]
    dtype, sources, destinations = _as_reals(request.dtype, sources, destinations)
    if op is ReduceOp.ADASUM:
        adasum(backend, sources, destinations, dtype, request.prescale_factor, postscale)
    else:
        backend.allreduce(sources, destinations, dtype, op, request.prescale_factor, postscale)


def _as_reals(dtype: DType, *lists: Sequence[Array]) -> tuple[Any, ...]:
    """Complex numbers as pairs of reals, which add up and scale each on its own; other types as they are."""
    real = dtype.real
    if real is dtype:
        return dtype, *lists
    return real, *([array.view(real.storage) for array in arrays] for arrays in lists)


def _allgather(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> None:
    sources = [work.input().bytes for work in works]
    outputs = [_gathered(work, response.sizes) for work, response in zip(works, responses, strict=True)]
    counts = [[rows * _row_bytes(work) for rows in each.sizes] for work, each in zip(works, responses, strict=True)]
    backend.allgather(sources, _by_member(outputs, counts), [sum(of_member) for of_member in zip(*counts, strict=True)])


def _gathered(work: Work, sizes: Sequence[int]) -> Bytes:
    work.received_splits = tuple(sizes)
    return work.allocate((sum(sizes), *work.request.shape[1:])).bytes


def _row_bytes(work: Work) -> int:
    return prod(work.request.shape[1:]) * work.request.dtype.itemsize


def _by_member(tensors: Sequence[Array], counts: Sequence[Sequence[int]]) -> Sequence[Array]:
    """The tensors' parts of member 0, then those of member 1...; ``counts[i][m]`` elements of tensor i belong to m."""
    if len(tensors) == 1:
        return tensors
    parts = [np.split(tensor, list(accumulate(count))[:-1]) for tensor, count in zip(tensors, counts, strict=True)]
    return [part for of_member in zip(*parts, strict=True) for part in of_member]


def _broadcast(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    output = work.allocate(work.request.shape)
    backend.broadcast(work.input().bytes, output.bytes, members.index(work.request.root_rank))


def _alltoall(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    row = _row_bytes(work)
    output = _gathered(work, response.sizes[backend.rank :: backend.size])
    send = [rows * row for rows in work.request.splits]
    source = work.input().bytes[: sum(send)]
    backend.alltoall(source, output, send, [rows * row for rows in work.received_splits])


def _reducescatter(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> None:
    request = works[0].request
    op, postscale = _summed(request, backend.size)
    counts = [_kept_elements(work.request, backend.size) for work in works]
    sources = _by_member([work.input().host for work in works], counts)
    destinations = [_kept(work, backend) for work in works]
    dtype, sources, destinations = _as_reals(request.dtype, sources, destinations)
    parts = request.dtype.itemsize // dtype.itemsize
    totals = [sum(of_member) * parts for of_member in zip(*counts, strict=True)]
    backend.reducescatter(sources, destinations, totals, dtype, op, request.prescale_factor, postscale)


def _kept_elements(request: Request, size: int) -> list[int]:
    return [rows * prod(request.shape[1:]) for rows in split_rows(request.shape[0], size)]


def _kept(work: Work, backend: Backend) -> Array:
    rows = split_rows(work.request.shape[0], backend.size)[backend.rank]
    return work.allocate((rows, *work.request.shape[1:])).host


def _barrier(work: Work, response: Response, members: Sequence[int], backend: Backend) -> None:
    backend.barrier()


_RUN_FUSED: dict[Operation, Callable[[Sequence[Work], Sequence[Response], Backend], None]] = {
    Operation.ALLREDUCE: _allreduce,
    Operation.ALLGATHER: _allgather,
    Operation.REDUCESCATTER: _reducescatter,
}
_RUN: dict[Operation, Callable[[Work, Response, Sequence[int], Backend], None]] = {
    Operation.BROADCAST: _broadcast,
    Operation.ALLTOALL: _alltoall,
    Operation.BARRIER: _barrier,
}


def split_rows(rows: int, size: int) -> list[int]:
    """Rows for each member of a reducescatter: the first ``rows % size`` members get one more."""
    share, rest = divmod(rows, size)
    return [share + (member < rest) for member in range(size)]
