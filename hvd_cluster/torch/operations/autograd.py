"""Torch's side of operations: their gradients, and their place in a graph that torch compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch

from collectives.api import InvalidRequestError, Operation
from hvd_cluster.ops.backward import of_group
from hvd_cluster.ops.refusals import report

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
