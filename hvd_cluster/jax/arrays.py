"""Arrays of JAX that a compiled step takes for good: how to notice that, and how to save them if the step fails.

JAX gives the memory of the variables to the step, for the new ones, so a step that fails leaves neither. But XLA
leaves the memory of a tensor alone as long as a call reads it. In that moment the variables are still those before the
step, because all updates wait for the gradients.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax


def is_gone(array: Any) -> bool:
    """Whether there is no array, because Keras has taken it away, or whether a step has taken its memory."""
    return array is None or bool(array.is_deleted())


def is_lost(array: Any) -> bool:
    """Whether it is gone, or the result of a step that failed. Waits for that step."""
    if is_gone(array):
        return True
    try:
        array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def is_traced(value: Any) -> bool:
    """Whether an array in ``value``, or the value of a variable there, only stands for one in a function that JAX
    traces.
    """
    return any(isinstance(getattr(each, "value", each), jax.core.Tracer) for each in jax.tree.leaves(value))


def wait(arrays: Sequence[Any]) -> None:
    """Wait for the steps that make ``arrays``. One that fails raises nothing here; a read of its arrays raises."""
    with suppress(jax.errors.JaxRuntimeError):
        jax.block_until_ready(  # type: ignore[no-untyped-call]
            [array for array in arrays if not is_gone(array)]
        )


class VariableReader(NamedTuple):
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


def readers() -> tuple[tuple[VariableReader, ...], Sequence[Any]]:
    """The operands that a call takes for this purpose which is traced here, and their values."""
    variables, values = _operands.get()
    _covered.update({id(variable): variable for variable in variables})
    sizes = [value.size * value.dtype.itemsize for value in values]
    return tuple(map(VariableReader, map(id, variables), sizes)), values


def is_covered(variable: Any) -> bool:
    """Whether there is a step that saves ``variable``."""
    return _covered.get(id(variable)) is variable


def save(readers: Sequence[VariableReader], addresses: Sequence[int]) -> None:
    """The step of these operands fails."""
    pairs = zip(readers, addresses, strict=True)
    _saved.update({reader.key: c.string_at(address, reader.size) for reader, address in pairs})


def take(variable: Any) -> bytes | None:
    """The contents that ``variable`` had in the last step that failed, if it was in it; once."""
    return _saved.pop(id(variable), None)


def drop() -> None:
    """A later step has its gradients: the saved contents are not needed any more."""
    _saved.clear()
