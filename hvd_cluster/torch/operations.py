"""Collectives on torch tensors.

Arguments mean the same everywhere:

``name``
    keys the operation across ranks: ranks submit in any order, equal names meet. Without one, the n-th unnamed
    operation of a kind on each rank meet.
``op``
    Average (default), Sum, Min, Max or Product, of the elements of all members; Adasum for allreduce of floats, on a
    power of two of ranks. 16-bit floats are accumulated in float32; an Average of integers is their exact sum, divided
    and truncated. ``average=True/False`` is the deprecated form of Average and Sum.
``prescale_factor``, ``postscale_factor``
    multiply each tensor before, and the result after; integers are truncated towards zero.
``process_set``
    the ranks that take part; ``root_rank`` is a global rank all the same.

dtypes: uint8, int8, int16, int32, int64, float16, bfloat16, float32, float64, bool (not averaged or scaled). Tensors
of any strides, 0-d and empty ones work; allgather, alltoall and reducescatter need a first dimension. The tensor must
not change before an asynchronous operation is synchronized.

Raises, here or from ``synchronize``: ValueError for what is wrong on this rank (dtype, splits, a name still in
flight); HorovodInternalError on every member when the ranks disagree (the engine stays usable), when a rank is lost,
and before ``init()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from collectives.api import InvalidRequestError, Operation, ReduceOp
from collectives.buffers import Buffer
from collectives.work import Work
from hvd_cluster import basics
from hvd_cluster.operations import as_factor, choose_op, process_set_id, start, whole_splits
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.compression import Compression, Compressor, require_compressor
from hvd_cluster.torch.tensors import allocator, as_input, require_tensor, require_writable, to_buffer

__all__ = [
    "Handle",
    "HandleGroup",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "join",
    "output",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "same_shape",
    "synchronize",
]

Result: TypeAlias = Any
Finish: TypeAlias = Callable[[Work], Result]
Splits: TypeAlias = "Sequence[int] | torch.Tensor | None"


class Handle:
    """An operation in flight; give it to :func:`poll` and :func:`synchronize`."""

    __slots__ = ("_finish", "work")

    def __init__(self, work: Work, finish: Finish) -> None:
        self.work = work
        self._finish: Finish | None = finish

    def is_done(self) -> bool:
        """Whether the result is there, or an error."""
        return self.work.done or basics.engine().poll(self.work)

    def wait(self) -> None:
        """Return when it is; raises the error."""
        if self.work.done:
            self.work.outcome()
        else:
            basics.engine().synchronize(self.work)

    def take(self) -> Result:
        """The result, the first time; None afterwards."""
        finish, self._finish = self._finish, None
        return None if finish is None else finish(self.work)


class HandleGroup:
    """The operations of a group in flight; :func:`synchronize` gives what each of them gives, in ``kind``."""

    __slots__ = ("_handles", "_kind")

    def __init__(self, handles: Sequence[Handle], kind: Callable[[Iterable[Any]], Any]) -> None:
        self._handles: Sequence[Handle] | None = handles
        self._kind = kind

    def is_done(self) -> bool:
        """Whether all results are there."""
        return all([handle.is_done() for handle in self._handles or ()])

    def wait(self) -> None:
        """Return when they are; raises the error of the group."""
        for handle in self._handles or ():
            handle.wait()

    def take(self) -> Any:
        """The results, the first time; None afterwards."""
        handles, self._handles = self._handles, None
        return None if handles is None else self._kind(handle.take() for handle in handles)


def output(work: Work) -> torch.Tensor:
    """The tensor that an operation filled."""
    tensor: torch.Tensor = work.result().owner
    return tensor


def _output_and_splits(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    return output(work), torch.tensor(work.received_splits, dtype=torch.int32)


def poll(handle: Handle | HandleGroup) -> bool:
    """Whether :func:`synchronize` would return at once; InvalidRequestError for what is no handle."""
    _require_handle(handle)
    return handle.is_done()


def synchronize(handle: Handle | HandleGroup) -> Result:
    """Wait for the operation; its tensor, (tensor, received_splits) for alltoall, or the tensors of a group.

    None for a handle that was synchronized before.
    """
    _require_handle(handle)
    handle.wait()
    return handle.take()


def _require_handle(handle: Any) -> None:
    if not isinstance(handle, Handle | HandleGroup):
        raise InvalidRequestError(f"{handle!r} is not a handle; give what an *_async function returned")


def _start_same_shape(
    operation: Operation, tensor: torch.Tensor, inplace: bool, name: str | None, process_set: ProcessSet, **fields: Any
) -> Handle:
    """Start an operation whose result has the shape of ``tensor``, into ``tensor`` itself or a new one."""
    source, target, finish = same_shape(tensor, inplace)
    return Handle(start(operation, source, target, name, process_set, **fields), finish)


def same_shape(tensor: torch.Tensor, inplace: bool) -> tuple[Buffer, Buffer, Finish]:
    """The source, the destination, and what gives the result, of an operation that keeps the shape."""
    source = as_input(tensor)
    if inplace:
        require_writable(tensor)
    buffer = to_buffer(source)
    if inplace:
        return buffer, buffer, _writer(tensor, source)
    return buffer, to_buffer(torch.empty_like(source)), output


def _writer(tensor: torch.Tensor, contiguous: torch.Tensor) -> Callable[[Work], torch.Tensor]:
    """What gives the user's tensor back, after an operation in place on its memory or on a contiguous copy."""

    def finish(work: Work) -> torch.Tensor:
        if contiguous.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(contiguous)
        return tensor

    return finish


def _start_allreduce(
    tensor: torch.Tensor,
    inplace: bool,
    average: bool | None,
    name: str | None,
    op: ReduceOp | None,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    wait: bool = False,
) -> Handle:
    return _start_same_shape(
        Operation.ALLREDUCE,
        tensor,
        inplace,
        name,
        process_set,
        op=choose_op(average, op),
        prescale_factor=as_factor(prescale_factor),
        postscale_factor=as_factor(postscale_factor),
        wait=wait,
    )


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start combining ``tensor`` over all ranks, element by element, into a new tensor."""
    return _start_allreduce(tensor, False, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start combining ``tensor`` over all ranks, in place."""
    return _start_allreduce(tensor, True, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks, element by element; returns a new tensor of the same shape."""
    require_compressor(compression)
    small, context = compression.compress(require_tensor(tensor))
    handle = _start_allreduce(small, False, average, name, op, prescale_factor, postscale_factor, process_set, True)
    return compression.decompress(handle.take(), context)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks, in place."""
    handle = _start_allreduce(tensor, True, average, name, op, prescale_factor, postscale_factor, process_set, True)
    result: torch.Tensor = handle.take()
    return result


def _start_allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet, wait: bool = False) -> Handle:
    source = as_input(tensor)
    work = start(Operation.ALLGATHER, to_buffer(source), allocator(source), name, process_set, wait)
    return Handle(work, output)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start concatenating the tensors of all ranks along the first dimension."""
    return _start_allgather(tensor, name, process_set)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the tensors of all ranks in rank order; only the first dimensions may differ."""
    result: torch.Tensor = _start_allgather(tensor, name, process_set, True).take()
    return result


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start copying the root's tensor to a new tensor on every rank."""
    return _start_same_shape(Operation.BROADCAST, tensor, False, name, process_set, root_rank=root_rank)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start copying the root's tensor into ``tensor`` on every rank."""
    return _start_same_shape(Operation.BROADCAST, tensor, True, name, process_set, root_rank=root_rank)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The root's tensor, as a new tensor on every rank; all give a tensor of the same shape."""
    handle = _start_same_shape(Operation.BROADCAST, tensor, False, name, process_set, root_rank=root_rank, wait=True)
    result: torch.Tensor = handle.take()
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Overwrite ``tensor`` with the root's on every rank."""
    handle = _start_same_shape(Operation.BROADCAST, tensor, True, name, process_set, root_rank=root_rank, wait=True)
    result: torch.Tensor = handle.take()
    return result


def _splits(splits: Splits) -> list[int] | None:
    if splits is None:
        return None
    try:
        tensor = torch.as_tensor(splits)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidRequestError(f"splits must be a list or 1-d tensor of integers, not {splits!r}") from None
    if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise InvalidRequestError(f"splits must be a list or 1-d tensor of integers, not {splits!r}")
    values: list[int] = tensor.tolist()
    return values


def _start_alltoall(
    tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet, wait: bool = False
) -> Handle:
    source = as_input(tensor)
    rows = source.shape[0] if source.dim() else 0
    shares = whole_splits(_splits(splits), rows, process_set)
    work = start(Operation.ALLTOALL, to_buffer(source), allocator(source), name, process_set, wait, splits=shares)
    return Handle(work, _output_and_splits)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start sending ``splits[r]`` rows to each rank r; synchronize gives (tensor, received_splits)."""
    return _start_alltoall(tensor, splits, name, process_set)


def alltoall(
    tensor: torch.Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send ``splits[r]`` consecutive rows to each rank r, and concatenate what comes, in rank order.

    Without ``splits``, equal shares; with them the result is (tensor, received_splits), the latter int32.
    """
    output, received = _start_alltoall(tensor, splits, name, process_set, True).take()
    return output if splits is None else (output, received)


def _start_reducescatter(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
    wait: bool = False,
) -> Handle:
    source = as_input(tensor)
    work = start(
        Operation.REDUCESCATTER,
        to_buffer(source),
        allocator(source),
        name,
        process_set,
        wait,
        op=choose_op(None, op),
        prescale_factor=as_factor(prescale_factor),
        postscale_factor=as_factor(postscale_factor),
    )
    return Handle(work, output)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start combining ``tensor`` over all ranks and keeping this rank's rows."""
    return _start_reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine ``tensor`` (Average or Sum) over all ranks and keep this rank's rows.

    The first ``shape[0] % size`` ranks get one row more than the others.
    """
    require_compressor(compression)
    small, context = compression.compress(require_tensor(tensor))
    handle = _start_reducescatter(small, name, op, process_set, prescale_factor, postscale_factor, True)
    return compression.decompress(handle.take(), context)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every member has called it, or has joined."""
    basics.engine().barrier(process_set_id(process_set))


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Return the global rank that joined last, when all members have joined; for ranks that run out of data first.

    Until then this rank takes part in what the others submit, without data: zeros for a sum or an average (which still
    divides by the full size), no rows for allgather and alltoall, and what changes nothing for Min, Max and Product. A
    broadcast must not come from it. ``device`` is accepted for compatibility: -1, or the number of a GPU.
    """
    return basics.engine().join(process_set_id(process_set))
