"""The arguments of collectives, checked: a wrong one is an InvalidRequestError before anything is sent."""

from __future__ import annotations

import operator
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from collectives import InvalidRequestError, MismatchError, ReduceOp

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
Adasum = ReduceOp.ADASUM


_POSITION = re.compile(r"(?:\[(\d+)\]|\.(\d+))$")


def with_variable(error: MismatchError, names: Sequence[str]) -> MismatchError:
    """``error``, with the one of ``names`` that is at the position of its tensor."""
    return type(error)(f"{error}{about(error, names)}", error.tensor, error.property, error.values)


def about(error: MismatchError, names: Sequence[str]) -> str:
    """The end of a message: the name of the variable at the position of the tensor; empty if it has no position."""
    found = _POSITION.search(error.tensor)
    position = int(found[1] or found[2]) if found else len(names)
    return f". It is the variable {names[position]!r} of this rank" if position < len(names) else ""


T = TypeVar("T")


class Reduction(NamedTuple):
    """How elements are combined: each is multiplied before, and the result after."""

    op: ReduceOp
    prescale_factor: float = 1.0
    postscale_factor: float = 1.0


PLAIN_SUM = Reduction(ReduceOp.SUM)
_reduction = lru_cache(Reduction)  # most calls repeat, and to find one is faster than to make it


def reduction(
    average: bool | None, op: ReduceOp | int | None, prescale_factor: Any = 1.0, postscale_factor: Any = 1.0
) -> Reduction:
    """The reduction that a user asks for; Average is the default.

    Called by an operation that the user called through a wrapper: a warning points to the user's line.
    InvalidRequestError when both ``op`` and the deprecated ``average`` are given, for an unknown op, and for factors
    that are no numbers.
    """
    return _reduction(
        choose_op(average, op, stacklevel=5),
        prescale_factor if type(prescale_factor) is float else as_factor(prescale_factor),
        postscale_factor if type(postscale_factor) is float else as_factor(postscale_factor),
    )


def choose_op(average: bool | None, op: ReduceOp | int | None, stacklevel: int = 4) -> ReduceOp:
    """The op of :func:`reduction`. ``stacklevel`` leads to the user's line, for a warning."""
    if average is not None:
        if op is not None:
            raise InvalidRequestError("give op= or the deprecated average=, not both")
        warnings.warn("average= is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=stacklevel)
        return ReduceOp.AVERAGE if average else ReduceOp.SUM
    try:
        return ReduceOp.AVERAGE if op is None else op if type(op) is ReduceOp else ReduceOp(op)
    except ValueError:
        allowed = ", ".join(member.name.capitalize() for member in ReduceOp)
        raise InvalidRequestError(f"op={op!r} is not a reduction; use one of {allowed}") from None


def require_sparse_op(op: ReduceOp, is_bool: bool) -> None:
    """InvalidRequestError unless ``op`` can combine sparse tensors, of bools or of numbers."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(f"op {op.name.capitalize()} is not available for sparse tensors; use Average or Sum")
    if op is ReduceOp.AVERAGE and is_bool:
        raise InvalidRequestError(
            "op Average is not available for bool; use Sum, which gives True where any rank has True"
        )


def as_factor(value: Any) -> float:
    """A scale factor as a float; InvalidRequestError if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidRequestError(f"a scale factor of {value!r} is not allowed; give a finite number") from None


def as_rank(root_rank: Any) -> int:
    """``root_rank`` as an integer; InvalidRequestError if it is no integer."""
    try:
        return operator.index(root_rank)
    except TypeError:
        raise InvalidRequestError(f"root_rank={root_rank!r} must be an integer, the global rank of the root") from None


def as_group(tensors: Iterable[Any], tensor_type: type, require: Callable[[Any], T]) -> list[T]:
    """The tensors of a group, each checked by ``require``; InvalidRequestError for one tensor."""
    if isinstance(tensors, tensor_type):
        raise InvalidRequestError("a group is a list of tensors, not one tensor; use the function for one, or [tensor]")
    return [require(tensor) for tensor in tensors]


def as_splits(splits: Any) -> tuple[int, ...]:
    """The splits of an alltoall as plain integers: of a list, or of a 1-d array or tensor of integers.

    None means no splits, and so equal ones.
    """
    if splits is None:
        return ()
    values = splits.tolist() if hasattr(splits, "tolist") else splits
    try:
        return tuple(map(_as_integer, values))
    except TypeError:
        raise InvalidRequestError(f"splits must be a list or 1-d tensor of integers, not {splits!r}") from None


def _as_integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)
