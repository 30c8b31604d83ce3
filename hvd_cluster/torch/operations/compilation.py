"""Collectives under ``torch.compile``: the graph ends before each of them, and continues after it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from collectives.api import InvalidRequestError, Operation
from hvd_cluster.operations.refusals import report

__all__ = ["collective", "uncompiled"]

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
