"""The variables that a compiled step takes for good: its allreduce reads them, and saves them if it fails.

JAX gives the memory of the variables to the step, for the new ones, so a step that fails leaves neither. But XLA
leaves the memory of a tensor alone as long as a call reads it. In that moment the variables are still those before the
step, because all updates wait for the gradients.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

__all__ = ["Reader", "drop", "is_covered", "readers", "save", "saving", "take"]


class Reader(NamedTuple):
    """An operand of a call that has the values of a variable: the ``key`` of the variable, and ``size`` in bytes."""

    key: int
    size: int


_operands: ContextVar[tuple[Sequence[Any], Sequence[Any]]] = ContextVar("operands", default=((), ()))
_covered: WeakValueDictionary[int, Any] = WeakValueDictionary()
_saved: dict[int, bytes] = {}


@contextmanager
def saving(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    """The allreduce that is traced inside saves ``variables`` if it fails; they have ``values`` in that function."""
    token = _operands.set((variables, values))
    try:
        yield
    finally:
        _operands.reset(token)


def readers() -> tuple[tuple[Reader, ...], Sequence[Any]]:
    """The operands that a call takes for this purpose which is traced here, and their values."""
    variables, values = _operands.get()
    _covered.update({id(variable): variable for variable in variables})
    sizes = [value.size * value.dtype.itemsize for value in values]
    return tuple(map(Reader, map(id, variables), sizes)), values


def is_covered(variable: Any) -> bool:
    """Whether there is a step that saves ``variable``."""
    return _covered.get(id(variable)) is variable


def save(readers: Sequence[Reader], addresses: Sequence[int]) -> None:
    """The step of these operands fails."""
    pairs = zip(readers, addresses, strict=True)
    _saved.update({reader.key: c.string_at(address, reader.size) for reader, address in pairs})


def take(variable: Any) -> bytes | None:
    """The contents that ``variable`` had in the last step that failed, if it was in it; once."""
    return _saved.pop(id(variable), None)


def drop() -> None:
    """A later step has its gradients: the saved contents are not needed any more."""
    _saved.clear()
