"""``run`` on the backend of Keras, whose compiled functions may raise errors of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import keras

from hvd_cluster.elastic import loop
from hvd_cluster.elastic.loop import Recoverable

__all__ = ["run"]

P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")
Errors: TypeAlias = Callable[[], AbstractContextManager[object]]


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a compiled step counts like any other; steps that
    are compiled already go on with the new ranks.
    """
    return loop.run_inside(_errors(), func)


def _errors() -> Errors:
    """A context manager that raises the engine's errors in place of the errors of the backend."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvd_cluster.tensorflow.elastic.errors import engine_errors as of_tensorflow

        return of_tensorflow
    if backend == "jax":
        from hvd_cluster.jax.errors import engine_errors as of_jax

        return of_jax
    return nullcontext
