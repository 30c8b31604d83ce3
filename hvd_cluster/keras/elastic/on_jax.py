"""How changes of variables are noticed on JAX, and how those come back that a step that failed has destroyed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np

from collectives import override
from hvd_cluster.elastic.handlers import VariableChanges
from hvd_cluster.jax import arrays
from hvd_cluster.jax.arrays import is_gone, is_lost, wait
from hvd_cluster.keras import variables as values_of
from hvd_cluster.keras.optimizer.adjustments import adjust
from hvd_cluster.keras.optimizer.distributed import Distributed


class ByIdentity(VariableChanges):
    """An array of JAX never changes: a changed variable has another one.

    Variables that a failed step has saved get their values back, which is no change.
    """

    def __init__(self) -> None:
        self._count = 0
        self._seen: list[Any] = []
        self._variables: Sequence[Any] = ()

    @override
    def count(self, variables: Sequence[Any]) -> int:
        """Waits for the step that makes the arrays; it may fail."""
        if len(variables) != len(self._seen) or any(map(_differ, variables, self._seen)):
            wait([variable._value for variable in variables])  # ``value`` makes an array where Keras has taken it away
            self._count += not all([_put_back(variable) for variable in variables])
            self._seen = [variable._value for variable in variables]
        self._variables = variables
        return self._count

    @override
    def survive(self) -> bool:
        return all(map(arrays.is_covered, self._variables))


def _differ(variable: Any, before: Any) -> bool:
    return variable._value is not before or is_gone(before)


def _put_back(variable: Any) -> bool:
    """Whether ``variable`` was lost, and has the values again that the failed step has saved."""
    contents = arrays.take(variable) if is_lost(variable._value) else None
    if contents is None:
        return False
    values = np.frombuffer(contents, np.dtype(variable.dtype)).reshape(tuple(variable.shape))
    values_of.put(variable, values)
    return True


def save_variables() -> None:
    """From now on, distributed optimizers save the variables of a compiled step that fails; called once."""
    adjust()
    for kind in (Distributed, keras.optimizers.LossScaleOptimizer):
        _wrap(kind)


def _wrap(kind: Any) -> None:
    stateless_apply = kind.stateless_apply

    @functools.wraps(stateless_apply)
    def saving_apply(
        self: Any, optimizer_variables: Sequence[Any], grads: Any, trainable_variables: Sequence[Any]
    ) -> Any:
        values = [*trainable_variables, *optimizer_variables]
        with _saving([*self._trainable_variables, *self.variables], values):
            return stateless_apply(self, optimizer_variables, grads, trainable_variables)

    kind.stateless_apply = saving_apply


def _saving(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    """Nothing is saved where the lists do not fit, which Keras reports, or where arrays have several devices."""
    fits = len(variables) == len(values) and keras.distribution.distribution() is None
    return arrays.saving(variables, values) if fits else nullcontext()
