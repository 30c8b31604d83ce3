"""A tensor in flight, and how its operation begins on a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import inf, prod
from typing import TypeAlias

from collectives.api import DType, EngineError, HorovodInternalError, Operation, ReduceOp, Request
from collectives.backends.adasum import adasum
from collectives.backends.base import Backend
from collectives.backends.completion import DONE, Completion, all_of
from collectives.backends.memory import Memory
from collectives.backends.phases import PROFILER, activity
from collectives.buffers import Buffer
from collectives.controller.messages import Response

Allocator: TypeAlias = Callable[[tuple[int, ...]], Buffer]
Destination: TypeAlias = Buffer | Allocator | None


class Work:
    """A tensor in flight. ``done`` turns true once, after ``output`` or ``error`` is set.

    ``destination`` is a buffer or, where the result's shape depends on the other ranks, a function from shape to
    buffer. That may be called again, with another shape: an attempt that does not run has the sizes of an earlier call.
    ``received_splits`` counts the rows that came from each member (allgather, alltoall). ``answer`` is the rank that
    joined last, or the id of a new process set. ``owner`` stands for the engine. ``since`` is when it was submitted, in
    seconds of ``time.monotonic()``. ``batch`` is the number of its batch once that has started, None before and where
    no observer listens. ``is_counted``: its name is a number, which all ranks count. ``end`` is DONE, unless the device
    still works on it when this is done: then the user of the output lets a stream wait for it.
    """

    __slots__ = (
        "answer",
        "batch",
        "destination",
        "done",
        "end",
        "error",
        "is_counted",
        "output",
        "owner",
        "received_splits",
        "request",
        "since",
        "source",
        "urged",
    )

    def __init__(self, request: Request, source: Buffer | None, destination: Destination) -> None:
        self.request = request
        self.source = source
        self.destination = destination
        self.output: Buffer | None = None
        self.error: Exception | None = None
        self.received_splits: tuple[int, ...] = ()
        self.answer = 0
        self.batch: int | None = None
        self.urged = False
        self.is_counted = False
        self.owner: object = None
        self.since = 0.0
        self.end: Completion = DONE
        self.done = False

    def input(self) -> Buffer:
        """The buffer that was submitted."""
        if self.source is None:
            raise EngineError(f"{self.request.operation.value} {self.request.name!r} was submitted without a tensor")
        return self.source

    def allocate(self, shape: tuple[int, ...]) -> Buffer:
        """The buffer for a result of ``shape``; sets ``output``. That of an attempt that did not run is used again."""
        output = self.destination
        if callable(output):
            output = self._made(output, shape) if self.output is None or self.output.shape != shape else self.output
        if output is None or output.shape != shape:
            raise EngineError(f"{self.request.name!r}: no destination of shape {shape}, only {output}")
        self.output = output
        return output

    def _made(self, allocate: Allocator, shape: tuple[int, ...]) -> Buffer:
        try:
            return allocate(shape)
        except Exception as error:
            text = f"no memory for the result {shape} of {self.request.name!r}: {error}"
            raise HorovodInternalError(text) from error

    def result(self) -> Buffer:
        """The output of a finished work."""
        if self.output is None:
            raise EngineError(f"{self.request.operation.value} {self.request.name!r} has no result")
        return self.output

    def outcome(self) -> Buffer | None:
        """The output of a work that is done; raises its error."""
        if self.error is not None:
            raise fresh(self.error)
        return self.output

    def finish(self) -> None:
        """The output is complete; drops the input."""
        self.source = None
        self.done = True

    def fail(self, error: Exception) -> None:
        """The operation ended with ``error``."""
        self.source = None
        self.error = error
        self.done = True


class Watch:
    """Stands for a list of works where a caller waits for any of them.

    ``done`` turns true when one of them is done, or when another thread has ``interrupted`` the wait: it also calls
    :meth:`Engine.rouse`.
    """

    __slots__ = ("interrupted", "works")

    def __init__(self, works: Sequence[Work]) -> None:
        self.works = works
        self.interrupted = False

    @property
    def done(self) -> bool:
        """Whether the caller shall look at the list again."""
        return self.interrupted or any([work.done for work in self.works])

    def fail(self, error: Exception) -> None:
        """As :meth:`Work.fail`, for all that are not done."""
        for work in self.works:
            if not work.done:
                work.fail(error)


def fresh(error: Exception) -> Exception:
    """A copy to raise: an object that is raised repeatedly keeps the frames, and so the tensors, of each raise.

    It has the data of ``error``. Its constructor is not called, because it may take other arguments than ``args``.
    """
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


REDUCTIONS = frozenset({Operation.ALLREDUCE, Operation.REDUCESCATTER})
WITHOUT_ROWS = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})


def joined_input(response: Response, size: int, memory: Memory) -> Work:
    """The part of a rank without data in a collective of ``size`` members, in ``memory``; its result is not used.

    It consists of zeros for a sum or an average, which still divides by the full size; of no rows for an allgather or
    alltoall; and for MIN, MAX and PRODUCT, where zeros would decide the result, of the neutral value.
    """
    request = response.request
    if request.operation in WITHOUT_ROWS:
        request = replace(request, shape=(0, *request.shape[1:]), splits=(0,) * size)
    source = memory.empty(request.dtype, request.shape)
    if request.operation in REDUCTIONS:
        memory.fill(source, neutral(request.op, request.dtype))
    return Work(request, source, lambda shape: memory.empty(request.dtype, shape))


def neutral(op: ReduceOp, dtype: DType) -> float:
    """The neutral number of ``dtype`` under ``op``."""
    if op is ReduceOp.PRODUCT:
        return 1
    if op not in (ReduceOp.MIN, ReduceOp.MAX):
        return 0
    if dtype is DType.BOOL:
        return op is ReduceOp.MIN
    if not dtype.is_integer:
        return inf if op is ReduceOp.MIN else -inf
    bits = 8 * dtype.itemsize
    lowest, highest = (0, 2**bits - 1) if dtype is DType.UINT8 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return highest if op is ReduceOp.MIN else lowest


ADASUM, AVERAGE, SUM = ReduceOp.ADASUM, ReduceOp.AVERAGE, ReduceOp.SUM
"""To find a member in its Enum takes longer than to compare it."""


def execute(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> Completion:
    """Begin the batch on ``backend`` and set the outputs; ``works[i]`` is the work of this rank for ``responses[i]``.

    Works of a batch agree in everything that fusion compares. The outputs may be read, and the inputs changed, when the
    completion is done. Errors of the backend propagate.
    """
    if backend.on_phase is None or not PROFILER.is_recording():
        return _begin(works, responses, backend)
    with PROFILER.named(activity(works[0].request.operation.value, backend.name)):
        return _begin(works, responses, backend)


def _begin(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> Completion:
    operation = works[0].request.operation
    run_fused = _RUN_FUSED.get(operation)
    if run_fused is not None:
        return run_fused(works, responses, backend)
    run = _RUN[operation]
    if len(works) == 1:
        return run(works[0], responses[0], backend)
    return all_of([run(work, response, backend) for work, response in zip(works, responses, strict=True)])


def _summed(request: Request, size: int) -> tuple[ReduceOp, float]:
    """The op and postscale for a backend, which knows Average for integers only."""
    if request.op is AVERAGE and not request.dtype.is_integer:
        return SUM, request.postscale_factor / size
    return request.op, request.postscale_factor


def _allreduce(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> Completion:
    request = works[0].request
    op, postscale = _summed(request, backend.group.size)
    sources = [work.source or work.input() for work in works]
    destinations = [work.allocate(work.request.shape) for work in works]
    if request.dtype.has_parts:
        sources, destinations = _as_reals(sources), _as_reals(destinations)
    if op is ADASUM:
        return adasum(backend, sources, destinations, request.prescale_factor, postscale)
    return backend.allreduce(sources, destinations, op, request.prescale_factor, postscale)


def _as_reals(buffers: list[Buffer]) -> list[Buffer]:
    """Complex numbers as pairs of reals, which add up and scale each on its own."""
    return [buffer.cast(buffer.dtype.real) for buffer in buffers]


def _allgather(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> Completion:
    if len(works) == 1:
        work, sizes = works[0], responses[0].sizes
        return backend.allgather([work.input()], [_gathered(work, sizes)], _member_bytes(work, sizes))
    sources = [work.input() for work in works]
    outputs = [_gathered(work, response.sizes) for work, response in zip(works, responses, strict=True)]
    counts = [_member_bytes(work, response.sizes) for work, response in zip(works, responses, strict=True)]
    outputs = _by_member([output.cast(DType.UINT8) for output in outputs], counts)
    return backend.allgather(sources, outputs, [sum(of_member) for of_member in zip(*counts, strict=True)])


def _member_bytes(work: Work, sizes: Sequence[int]) -> list[int]:
    row = _row_bytes(work)
    return [rows * row for rows in sizes]


def _gathered(work: Work, sizes: Sequence[int]) -> Buffer:
    work.received_splits = tuple(sizes)
    return work.allocate((sum(sizes), *work.request.shape[1:]))


def _row_bytes(work: Work) -> int:
    return prod(work.request.shape[1:]) * work.request.dtype.itemsize


def _by_member(tensors: Sequence[Buffer], counts: Sequence[Sequence[int]]) -> list[Buffer]:
    """The parts of member 0 of all tensors, then those of member 1; ``counts[i][m]`` elements of i belong to m."""
    parts = [_split(tensor, count) for tensor, count in zip(tensors, counts, strict=True)]
    return [part for of_member in zip(*parts, strict=True) for part in of_member]


def _split(buffer: Buffer, counts: Sequence[int]) -> list[Buffer]:
    """Consecutive parts of ``counts`` elements."""
    return [buffer.part(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]


def _broadcast(work: Work, response: Response, backend: Backend) -> Completion:
    output = work.allocate(work.request.shape)
    return backend.broadcast(work.input(), output, backend.group.ranks.index(work.request.root_rank))


def _alltoall(work: Work, response: Response, backend: Backend) -> Completion:
    row, group = _row_bytes(work), backend.group
    output = _gathered(work, response.sizes[group.position :: group.size])
    send = [rows * row for rows in work.request.splits]
    return backend.alltoall(work.input(), output, send, [rows * row for rows in work.received_splits])


def _reducescatter(works: Sequence[Work], responses: Sequence[Response], backend: Backend) -> Completion:
    request, group = works[0].request, backend.group
    op, postscale = _summed(request, group.size)
    counts = [_kept_elements(work.request.shape, work.request.splits, group.size) for work in works]
    sources = [work.source or work.input() for work in works]
    destinations = [_kept(work, backend) for work in works]
    totals: Sequence[int] = counts[0]
    if len(works) > 1:
        sources = _by_member(sources, counts)
        totals = [sum(of_member) for of_member in zip(*counts, strict=True)]
    if request.dtype.has_parts:
        sources, destinations = _as_reals(sources), _as_reals(destinations)
        totals = [2 * total for total in totals]
    return backend.reducescatter(sources, destinations, totals, op, request.prescale_factor, postscale)


@lru_cache
def _kept_elements(shape: tuple[int, ...], splits: tuple[int, ...], size: int) -> Sequence[int]:
    return [rows * prod(shape[1:]) for rows in splits or split_rows(shape[0], size)]


def _kept(work: Work, backend: Backend) -> Buffer:
    shape, group = work.request.shape, backend.group
    rows = work.request.splits or split_rows(shape[0], group.size)
    return work.allocate((rows[group.position], *shape[1:]))


def _barrier(work: Work, response: Response, backend: Backend) -> Completion:
    return backend.barrier()


_RUN_FUSED: dict[Operation, Callable[[Sequence[Work], Sequence[Response], Backend], Completion]] = {
    Operation.ALLREDUCE: _allreduce,
    Operation.ALLGATHER: _allgather,
    Operation.REDUCESCATTER: _reducescatter,
}
_RUN: dict[Operation, Callable[[Work, Response, Backend], Completion]] = {
    Operation.BROADCAST: _broadcast,
    Operation.ALLTOALL: _alltoall,
    Operation.BARRIER: _barrier,
}


@lru_cache
def split_rows(rows: int, size: int) -> Sequence[int]:
    """Rows for each member of a reducescatter: the first ``rows % size`` members get one more."""
    share, rest = divmod(rows, size)
    return tuple([share + (member < rest) for member in range(size)])
