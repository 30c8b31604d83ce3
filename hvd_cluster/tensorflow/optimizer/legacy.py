"""Optimizers of ``tf.compat.v1`` that train on the gradients of all ranks, in sessions and in eager mode."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvd_cluster.optimizer.lists import ListCombiner
from hvd_cluster.tensorflow.optimizer.aggregation import LocalGradientAggregationHelper
from hvd_cluster.tensorflow.optimizer.binding import targets_of

__all__ = ["DeltaOptimizer", "GradientOptimizer"]

Pairs = list[tuple[Any, Any]]


class _Wrapper(tf.compat.v1.train.Optimizer):  # type: ignore[misc]
    """An optimizer that leaves all but the gradients to ``optimizer``."""

    def __init__(self, optimizer: Any, name: str, use_locking: bool, combiner: ListCombiner) -> None:
        super().__init__(name=name, use_locking=use_locking)
        self._optimizer = optimizer
        self._combiner = combiner

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """(gradient, variable) pairs of this rank, as of the wrapped optimizer."""
        pairs: Pairs = self._optimizer.compute_gradients(*args, **kwargs)
        return pairs

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def register_local_var(self, var: Any) -> None:
        """The gradient of ``var`` stays that of this rank. All ranks do the same."""
        self._combiner.keep_local(var)


class GradientOptimizer(_Wrapper):
    """``compute_gradients`` combines the gradients over all ranks."""

    def __init__(
        self, optimizer: Any, name: str, use_locking: bool, combiner: ListCombiner, passes: int, is_average: bool
    ) -> None:
        super().__init__(optimizer, name, use_locking, combiner)
        sparse_as_dense = combiner.options.sparse_as_dense
        self._passes = LocalGradientAggregationHelper(passes, self._combined, sparse_as_dense, is_average, name=name)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Pairs:
        """(gradient, variable) pairs, combined over all ranks in the last pass before a step."""
        pairs = super().compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        combined = self._passes.compute_gradients([gradient for gradient, _ in pairs], variables)
        return list(zip(combined, variables, strict=True))

    def apply_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """As of the wrapped optimizer, in the last pass; otherwise ``global_step`` counts the pass, and that is all."""
        apply = super().apply_gradients
        return self._passes.apply_gradients(lambda: apply(*args, **kwargs), self, *args, **kwargs)

    def _combined(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return self._combiner.combine(gradients, targets_of(variables))


class DeltaOptimizer(_Wrapper):
    """``apply_gradients`` steps on this rank alone, and combines the changes of the variables, with Adasum."""

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], global_step: Any = None, name: str | None = None
    ) -> Any:
        """The operation that steps; None in eager mode."""
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        starts = [tf.identity(variable.read_value()) for variable in variables]
        with tf.control_dependencies(starts):
            step = super().apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([step] if isinstance(step, tf.Operation | tf.Tensor) else []):
            changes = [variable.read_value() - start for variable, start in zip(variables, starts, strict=True)]
        combined = self._combiner.combine(changes, targets_of(variables))
        moves = zip(variables, starts, combined, strict=True)
        return tf.group(*[variable.assign(start + change) for variable, start, change in moves])
