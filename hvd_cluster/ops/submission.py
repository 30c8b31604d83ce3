"""Tensors on their way through the engine: the operand of a tensor, its request, and the handle of the operation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from collectives import Buffer, Destination, Engine, HorovodInternalError, InvalidRequestError, Operation, Request, Work
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction, as_rank

KEPT_REQUESTS = 1 << 12

LONGEST_KEPT = 512
"""The largest number of characters of a name, plus the number of splits, of a request that is kept.

Longer ones are mostly alltoalls on many ranks, with other splits each time: to keep them would only take memory.
"""


class _NotKeptError(Exception):
    """Carries a ``request`` that is too long to be kept past the cache, which keeps no errors."""

    def __init__(self, request: Request) -> None:
        self.request = request


def process_set_id(process_set: ProcessSet) -> int:
    """The id of a registered set; InvalidRequestError otherwise."""
    basics.engine()
    if not isinstance(process_set, ProcessSet):
        raise InvalidRequestError(f"process_set={process_set!r} is not a ProcessSet; make one with ProcessSet([ranks])")
    if process_set.process_set_id is None:
        raise InvalidRequestError(
            f"{process_set} is not registered; give it to init(process_sets=[...]) or to add_process_set()"
        )
    return process_set.process_set_id


@lru_cache(maxsize=KEPT_REQUESTS)
def _request(*fields: Any) -> Request:
    """Calls repeat from step to step: to find their request is faster than to make it.

    The engine then knows it by identity. Raises _NotKeptError.
    """
    request = Request(*fields)
    if len(request.name) + len(request.splits) > LONGEST_KEPT:
        raise _NotKeptError(request)
    return request


def label_of(operation: Operation, name: Any, group: bool = False) -> str:
    """The name in the engine of an operation or group called ``name``; without one, its kind, which gets a number."""
    if name is None:
        return f"grouped_{operation.label}" if group else operation.label
    return f"{operation.label}.{name}"


def submit(
    operation: Operation,
    source: Buffer,
    destination: Destination,
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    wait: bool = False,
    engine: Engine | None = None,
    root_rank: Any = -1,
    splits: tuple[int, ...] = (),
    tag: int = 0,
) -> Work:
    """Submit ``source``; with ``wait`` return the finished work. The rest are fields of :class:`Request`.

    ``engine``: that of the caller, by default the present one.
    """
    engine = engine or basics.engine()
    try:
        request = _request(
            label_of(operation, name),
            operation,
            source.dtype,
            source.shape,
            how.op,
            root_rank if type(root_rank) is int else as_rank(root_rank),
            how.prescale_factor,
            how.postscale_factor,
            0 if process_set is global_process_set else process_set_id(process_set),
            splits,
            source.device,
            "",
            0,
            tag,
        )
    except _NotKeptError as error:
        request = error.request
    call = engine.run if wait else engine.submit
    return call(request, source, destination, unnamed=name is None)


def submit_group(
    operation: Operation,
    tensors: Sequence[tuple[Buffer, Destination]],
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    engine: Engine | None = None,
    root_rank: int = -1,
    tag: int = 0,
) -> list[Work]:
    """As :func:`submit`, without a wait: sources with their destinations as a group. All run together, or none."""
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
                how.op,
                root_rank,
                how.prescale_factor,
                how.postscale_factor,
                id,
                (),
                source.device,
                label,
                count,
                tag,
            )
        except _NotKeptError as error:
            request = error.request
        works.append(Work(request, source, destination))
    engine.submit_group(works, unnamed=name is None)
    return works


Finish: TypeAlias = Callable[[Work], Any]
"""The user's result of a finished work."""
Kind: TypeAlias = Callable[[Iterable[Any]], Any]
"""Makes a list or a tuple of the results of a group."""


class Handle:
    """An operation in flight; give it to :func:`poll` and :func:`synchronize`."""

    __slots__ = ("_pending",)

    def __init__(self, work: Work, finish: Finish) -> None:
        self._pending: tuple[Work, Finish] | None = work, finish

    def is_done(self) -> bool:
        """Whether the operation has a result or an error."""
        if self._pending is None:
            return True
        work, _ = self._pending
        return (work.done or basics.engine().poll(work)) and _has_ended(work)

    def wait(self) -> None:
        """Return when the operation is done; raises its error."""
        if self._pending is None:
            return
        work, _ = self._pending
        if work.done:
            work.outcome()
        else:
            basics.engine().synchronize(work)

    def take(self) -> Any:
        """The result at the first call, which lets go of all tensors; None afterwards."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        work, finish = pending
        return finish(work)


def _has_ended(work: Work) -> bool:
    """Whether the device does not work on it any more; an error there is for those who synchronize."""
    try:
        return work.end.is_done
    except HorovodInternalError:
        return True


class HandleGroup:
    """The operations of a group in flight; :func:`synchronize` gives the result of each of them, in ``kind``."""

    __slots__ = ("_handles", "_kind")

    def __init__(self, handles: Sequence[Handle], kind: Kind) -> None:
        self._handles: Sequence[Handle] | None = handles
        self._kind = kind

    def is_done(self) -> bool:
        """Whether all operations are done."""
        return all([handle.is_done() for handle in self._handles or ()])

    def wait(self) -> None:
        """Return when all operations are done; raises the error of the group."""
        handles = self._handles or ()
        try:
            for handle in handles:
                handle.wait()
        except HorovodInternalError:
            for handle in handles:
                with suppress(HorovodInternalError):  # the names must be free
                    handle.wait()
            raise

    def take(self) -> Any:
        """The results at the first call; None afterwards."""
        handles, self._handles = self._handles, None
        return None if handles is None else self._kind(handle.take() for handle in handles)


def poll(handle: Handle | HandleGroup) -> bool:
    """Whether :func:`synchronize` would return at once; InvalidRequestError if it is no handle."""
    _require_handle(handle)
    return handle.is_done()


def synchronize(handle: Handle | HandleGroup) -> Any:
    """Wait for the operation; its tensor, (tensor, received_splits) for alltoall, or the tensors of a group.

    None for a handle that was synchronized before.
    """
    _require_handle(handle)
    handle.wait()
    return handle.take()


def run_all(starts: Iterable[Callable[[], Handle | HandleGroup]]) -> list[Any]:
    """Call all ``starts``, and then wait for what they have started; returns the results.

    One that is refused keeps no other from its start: the other ranks wait for these. Raises the first refusal, or
    else the first error, when nothing is in flight any more: all names are free.
    """
    handles: list[Handle | HandleGroup] = []
    errors: list[Exception] = []
    for start in starts:
        try:
            handles.append(start())
        except (InvalidRequestError, HorovodInternalError) as error:
            errors.append(error)
    results = []
    for handle in handles:
        try:
            results.append(synchronize(handle))
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


def _require_handle(handle: Any) -> None:
    if not isinstance(handle, Handle | HandleGroup):
        raise InvalidRequestError(f"{handle!r} is not a handle; give the handle that an *_async function returned")


class _Range:
    """``nbytes`` from ``address``, in NumPy's words."""

    def __init__(self, address: int, nbytes: int, is_writable: bool) -> None:
        data = address, not is_writable
        self.__array_interface__ = {"data": data, "shape": (nbytes,), "typestr": "|u1", "version": 3}


def at_address(address: int, nbytes: int, is_writable: bool = True) -> npt.NDArray[np.uint8]:
    """The memory of a framework as bytes; the caller keeps it alive."""
    return np.asarray(_Range(address, nbytes, is_writable))


class Operand(NamedTuple):
    """One tensor of an operation: the memory to read, the memory to write, and how the user's result is made of it."""

    source: Buffer
    destination: Destination
    finish: Finish


Describe: TypeAlias = Callable[[Any], Operand]
"""The operand of a framework's tensor; InvalidRequestError for a tensor that cannot travel."""


def start(
    operation: Operation,
    describe: Describe,
    tensor: Any,
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    **fields: Any,
) -> Handle:
    """Submit one tensor. ``fields``: ``root_rank``, ``splits`` or ``tag``."""
    operand = _described(describe, tensor, operation, name)
    work = submit(operation, operand.source, operand.destination, name, process_set, how, **fields)
    return Handle(work, operand.finish)


def run(
    operation: Operation,
    describe: Describe,
    tensor: Any,
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    **fields: Any,
) -> Any:
    """Submit one tensor, wait, and return the user's result."""
    try:
        source, destination, finish = describe(tensor)
    except InvalidRequestError as error:
        raise _named(error, operation, name) from error.__cause__
    return finish(submit(operation, source, destination, name, process_set, how, True, **fields))


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Sequence[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results. One of no tensors is done: nothing travels."""
    if not tensors:
        return HandleGroup((), kind)
    operands = [_described(describe, each, operation, name, number) for number, each in enumerate(tensors, start=1)]
    pairs = [(operand.source, operand.destination) for operand in operands]
    works = submit_group(operation, pairs, name, process_set, how, **fields)
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
