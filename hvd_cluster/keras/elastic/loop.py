"""``run`` on the backend of Keras, whose compiled functions may raise errors of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import keras

from hvd_cluster.elastic import loop
from hvd_cluster.elastic.loop import Recoverable

__all__ = ["run"]

P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a compiled step counts like any other; steps that
    are compiled already go on with the new ranks.
    """
    if keras.backend.backend() == "tensorflow":
        from hvd_cluster.tensorflow.elastic.loop import run as in_tensorflow

        return in_tensorflow(func)
    return loop.run(func)
