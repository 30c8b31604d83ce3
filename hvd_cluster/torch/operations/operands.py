"""Torch tensors as operands of operations, their gradients, and their place in a graph that torch compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.graph import increment_version

from collectives.api import InvalidRequestError, Operation
from collectives.backends.completion import DONE
from collectives.engine.work import Work
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops import handles, operands
from hvd_cluster.ops.arguments import as_group
from hvd_cluster.ops.backward import of_group
from hvd_cluster.ops.handles import Finish, HandleGroup, Kind
from hvd_cluster.ops.operands import Describe, Operand
from hvd_cluster.ops.refusals import report
from hvd_cluster.torch import gpu
from hvd_cluster.torch.tensors import (
    allocator,
    as_input,
    fresh,
    memory_format,
    require_tensor,
    require_writable,
    to_buffer,
)

P = ParamSpec("P")
T = TypeVar("T")


def uncompiled(function: Callable[P, T], home: str | None = None) -> Callable[P, T]:
    """``function``, which the compiler calls but does not trace, because it cannot compile an engine.

    ``home`` is the module that has the result, if it is not the function's own module: pickles refer to it.

    Unlike ``torch.compiler.disable`` it costs next to nothing where nothing is compiled, not even the import.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return,no-untyped-call]
        return function(*args, **kwargs)

    call.__module__ = home or function.__module__
    return call


def collective(
    operation: Operation, group: int | None = None, home: str | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a public operation: it is :func:`uncompiled`, and the other ranks hear of refused arguments.

    ``group`` is as in :func:`report`. One wrapper does both, because each costs time in every call.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if torch.compiler.is_dynamo_compiling():
                return torch.compiler.disable(call)(*args, **kwargs)  # type: ignore[no-any-return,no-untyped-call]
            try:
                return function(*args, **kwargs)
            except InvalidRequestError as error:
                report(error, operation, group, function, args, kwargs)
                raise

        call.__module__ = home or function.__module__
        return call

    return decorate


@uncompiled
def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The result of ``forward``; autograd calls ``backward`` for its gradients."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def backward_of_group(
    gradients: Sequence[torch.Tensor], backward: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> tuple[torch.Tensor | None, ...]:
    """As :func:`hvd_cluster.ops.backward.of_group`."""
    return of_group(gradients, lambda gradient: gradient.is_floating_point() or gradient.is_complex(), backward)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether autograd records operations on ``tensor`` now."""
    return tensor.requires_grad and torch.is_grad_enabled()


start, run = operands.start, operands.run  # of operations that are not compiled themselves
poll = uncompiled(handles.poll, __name__)
synchronize = uncompiled(handles.synchronize, __name__)
run_all = uncompiled(handles.run_all, __name__)


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Iterable[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results."""
    return operands.start_group(operation, describe, listed(tensors), kind, name, process_set, **fields)


def listed(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of a group; InvalidRequestError for one tensor, and for anything else in the list."""
    return as_group(tensors, torch.Tensor, require_tensor)


def in_place(tensor: torch.Tensor) -> Operand:
    """The result overwrites ``tensor``, and autograd learns of the change, in case it saved ``tensor`` for backward."""
    source = as_input(tensor)
    require_writable(tensor)
    buffer = to_buffer(source)

    def finish(work: Work) -> torch.Tensor:
        _await(work)
        if source.data_ptr() != tensor.data_ptr():
            with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
                tensor.copy_(source)
        elif not tensor.is_inference():  # which has no version
            increment_version(tensor)
        return tensor

    return Operand(buffer, buffer, finish)


def of_same_shape(tensor: torch.Tensor) -> Operand:
    """The result is a new tensor of the shape of ``tensor``."""
    source = as_input(tensor)
    shape = tuple(source.shape)
    destination = fresh(shape, source.dtype) if source.is_cpu else allocator(source)(shape)
    return Operand(to_buffer(source), destination, _output_like(tensor))


def of_other_shape(tensor: torch.Tensor) -> Operand:
    """The result is a new tensor; its number of rows depends on the tensors of all ranks."""
    source = as_input(tensor)
    return Operand(to_buffer(source), allocator(source), _output_like(tensor))


def _await(work: Work) -> None:
    """Let what the caller does next with the result wait for it, where that is on a GPU."""
    if work.end is not DONE:
        gpu.await_end(work)


def output(work: Work) -> torch.Tensor:
    """The result of ``work``, in memory of its own."""
    if work.end is not DONE:
        _await(work)
    tensor: torch.Tensor = work.result().owner
    return tensor


def _output_like(tensor: torch.Tensor) -> Finish:
    form = memory_format(tensor)
    if form is torch.contiguous_format:
        return output
    return lambda work: output(work).contiguous(memory_format=form)


def with_splits(tensor: torch.Tensor) -> Operand:
    """The result is a pair: the tensor of other shape, and the number of its rows from each member, in int32."""
    operand = of_other_shape(tensor)

    def finish(work: Work) -> tuple[Any, torch.Tensor]:
        return operand.finish(work), torch.tensor(work.received_splits, dtype=torch.int32)

    return Operand(operand.source, operand.destination, finish)


barrier = collective(Operation.BARRIER, home=__name__)(operands.barrier)
join = collective(Operation.JOIN, home=__name__)(operands.join)
