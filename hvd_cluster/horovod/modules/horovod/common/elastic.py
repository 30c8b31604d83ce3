"""The parts for elastic training that Horovod's bindings share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from hvd_cluster.elastic.loop import Recoverable, run
from hvd_cluster.elastic.state import ObjectState, State

__all__ = ["ObjectState", "State", "run_fn"]

P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


def run_fn(func: Callable[Concatenate[S, P], T], reset: Callable[[], object]) -> Callable[Concatenate[S, P], T]:
    """:func:`hvd_cluster.elastic.run`, which goes to the next world itself; ``reset`` is not called.

    Horovod's bindings shut down and start again in ``reset``. For more than that give the state a method ``reset``, or
    callbacks by ``register_reset_callbacks``.
    """
    return run(func)
