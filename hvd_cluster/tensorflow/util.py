"""Variables as keys, in Horovod's module of this name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

__all__ = ["refs_to_vars", "vars_to_refs"]


def vars_to_refs(vars: Iterable[Any]) -> tuple[Any, ...]:
    """A hashable tuple with the reference of each of ``vars``; nested lists become tuples."""
    return tuple(each.ref() if isinstance(each, tf.Variable) else vars_to_refs(each) for each in vars)


def refs_to_vars(refs: Iterable[Any]) -> list[Any]:
    """The variables of what :func:`vars_to_refs` has returned, in lists."""
    return [refs_to_vars(each) if isinstance(each, tuple) else each.deref() for each in refs]


def _check_has_gpu() -> bool:
    return bool(tf.config.list_physical_devices("GPU"))
