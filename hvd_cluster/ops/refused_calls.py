"""Calls that a binding refuses because of their arguments: the ranks on which the call is right must not wait for it.

A binding wraps each of its operations, see :func:`collective`. So nothing is checked twice, and a call that succeeds
has no cost. Other code tells the ranks by :func:`refuse`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from collectives import InvalidRequestError, Operation, Request
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.submission import label_of

P = ParamSpec("P")
T = TypeVar("T")


def _always() -> bool:
    return True


def collective(
    operation: Operation, group: int | None = None, runs_now: Callable[[], bool] = _always
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a function a public operation: the other ranks hear of arguments that it refuses, if it ``runs_now``.

    ``group`` is as in :func:`report`.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return function(*args, **kwargs)
            except InvalidRequestError as error:
                if runs_now():
                    report(error, operation, group, function, args, kwargs)
                raise

        return call

    return decorate


def report(
    error: InvalidRequestError,
    operation: Operation,
    group: int | None,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Report to the other ranks that ``function(*args, **kwargs)`` ended with ``error``.

    Does nothing if they know of it, or do not wait for this rank. ``group`` is the number of tensors of a call that
    submits a group, 0 where this is the length of its argument ``tensors``, and None for one tensor. A wrong
    ``process_set`` counts as the global one.
    """
    if error.reported or not basics.is_initialized():
        return
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    given = arguments.get("process_set")
    process_set = given if isinstance(given, ProcessSet) else global_process_set
    refuse(error, operation, arguments.get("name"), process_set, _length(group, arguments))


def refuse(
    error: InvalidRequestError, operation: Operation, name: Any, process_set: ProcessSet, length: int | None
) -> None:
    """Report a call for a group of ``length`` tensors, or for one tensor where that is None.

    Does nothing if the others know of ``error``. A call without a name gets the name of its number, as if it had been
    submitted. A set that is not registered has no members that could wait.
    """
    if error.reported:
        return
    error.reported = True
    id = process_set.process_set_id
    if id is not None:
        basics.engine().reject(_requests(operation, name, id, length), error, unnamed=name is None)


@contextmanager
def refusing(operation: Operation, name: str, process_set: ProcessSet, length: int | None = None) -> Iterator[None]:
    """Around the start of a call: where it raises InvalidRequestError, that is reported as by :func:`refuse`."""
    try:
        yield
    except InvalidRequestError as error:
        if basics.is_initialized():
            refuse(error, operation, name, process_set, length)
        raise


def _length(group: int | None, arguments: Mapping[str, Any]) -> int | None:
    if group != 0:
        return group
    return length_of(arguments.get("tensors"))


def length_of(tensors: Any) -> int:
    """The number of tensors of a call for a group, as far as it has one."""
    return max(1, len(tensors)) if isinstance(tensors, list | tuple) else 1


def _requests(operation: Operation, name: Any, process_set: int, length: int | None) -> list[Request]:
    """The requests of a call, as far as they matter for one that is refused."""
    if length is None:
        return [Request(label_of(operation, name), operation, process_set=process_set)]
    label = label_of(operation, name, group=True)
    return [
        Request(f"{label}[{index}]", operation, process_set=process_set, group=label, group_size=length)
        for index in range(length)
    ]
