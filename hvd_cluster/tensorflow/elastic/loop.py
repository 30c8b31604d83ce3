"""``run`` for functions in which TensorFlow raises its own errors for collectives that failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import tensorflow as tf

from collectives.api import HorovodInternalError
from collectives.engine.work import fresh
from hvd_cluster.elastic import loop
from hvd_cluster.elastic.loop import Recoverable
from hvd_cluster.tensorflow.errors import engine_error

__all__ = ["engine_errors", "run"]

P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raises the HorovodInternalError for which an error of TensorFlow stands; all other errors pass."""
    try:
        yield
    except tf.errors.OpError as error:
        cause = engine_error(error)
        if not isinstance(cause, HorovodInternalError):
            raise
        raise fresh(cause) from error


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a graph counts like any other; functions that are
    traced already go on with the new ranks.
    """
    return loop.run_inside(engine_errors, func)
