"""Arrays of JAX, which a step may take away, or which it fails to make."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import jax

__all__ = ["is_gone", "is_lost", "is_traced", "wait"]


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
