"""Torch's side of operations: their gradients, groups, handles, and their place in a graph that torch compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from collectives import InvalidRequestError, Operation
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.ops import submission
from hvd_cluster.ops.arguments import PLAIN_SUM, Reduction, as_group
from hvd_cluster.ops.backward import of_group
from hvd_cluster.ops.refused_calls import report
from hvd_cluster.ops.submission import Describe, HandleGroup, Kind
from hvd_cluster.torch.tensors import require_tensor

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


poll = uncompiled(submission.poll, __name__)
synchronize = uncompiled(submission.synchronize, __name__)
run_all = uncompiled(submission.run_all, __name__)


def start_group(
    operation: Operation,
    describe: Describe,
    tensors: Iterable[Any],
    kind: Kind,
    name: str | None,
    process_set: ProcessSet,
    how: Reduction = PLAIN_SUM,
    **fields: Any,
) -> HandleGroup:
    """Submit a group; ``kind`` makes one object of the results."""
    return submission.start_group(operation, describe, listed(tensors), kind, name, process_set, how, **fields)


def listed(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of a group; InvalidRequestError for one tensor, and for anything else in the list."""
    return as_group(tensors, torch.Tensor, require_tensor)


barrier = collective(Operation.BARRIER, home=__name__)(submission.barrier)
join = collective(Operation.JOIN, home=__name__)(submission.join)
