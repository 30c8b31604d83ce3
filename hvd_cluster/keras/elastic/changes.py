"""How a change of variables is noticed: each backend has a way of its own, or none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import keras

from collectives import override
from hvd_cluster.elastic.handlers import VariableChanges
from hvd_cluster.elastic.steps import watchers


class _ByVersion(VariableChanges):
    """torch counts the changes of each tensor in place."""

    @override
    def count(self, variables: Sequence[Any]) -> int:
        return sum([variable.value._version for variable in variables])


class _Unknown(VariableChanges):
    """TensorFlow does not tell. The optimizer does, see ``steps``; its iterations tell of one that does not."""

    tells = False

    @override
    def count(self, variables: Sequence[Any]) -> int:
        return 0


def changes() -> VariableChanges:
    """For the backend of Keras."""
    backend = keras.backend.backend()
    if backend == "jax":
        from hvd_cluster.keras.elastic.on_jax import ByIdentity

        return ByIdentity()
    return _ByVersion() if backend == "torch" else _Unknown()


@cache
def watch() -> None:
    """Let the states of this process hear of the steps of all optimizers, also in graphs that are built from now on.

    Every optimizer calls ``Optimizer.apply``, after the reduction of gradients. On JAX it does so while a step is
    compiled, not while it runs: there the reduction tells of steps.
    """
    backend = keras.backend.backend()
    if backend == "jax":
        from hvd_cluster.keras.elastic.on_jax import save_variables

        save_variables()
    else:
        _wrap(keras.optimizers.Optimizer, _in_tensorflow() if backend == "tensorflow" else _at_once)


Updating = Callable[[Sequence[Any]], AbstractContextManager[None]]


def _wrap(kind: Any, updating: Updating) -> None:
    apply = kind.apply

    @functools.wraps(apply)
    def watched(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        with updating(grads):
            return apply(self, grads, trainable_variables)

    kind.apply = watched


def _at_once(grads: Sequence[Any]) -> AbstractContextManager[None]:
    watchers.step_began()
    return nullcontext()


def _in_tensorflow() -> Updating:
    from hvd_cluster.tensorflow.updates import updating

    return updating
