"""``run`` for functions in which TensorFlow raises its own errors for collectives that failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hvd_cluster.elastic import loop
from hvd_cluster.elastic.loop import Recoverable
from hvd_cluster.tensorflow.elastic.errors import engine_errors

__all__ = ["run"]

P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a graph counts like any other; functions that are
    traced already go on with the new ranks.
    """
    return loop.run_inside(engine_errors, func)
