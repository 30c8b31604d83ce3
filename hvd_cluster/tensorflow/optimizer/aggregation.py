"""Adds up the gradients of several backward passes on this rank, before they travel: in eager mode and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from collectives import InvalidRequestError
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.options import check_passes
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists, targets_of


class LocalGradientAggregationHelper:
    """Of every ``backward_passes_per_step`` passes the last one sends the sums, or averages, and steps.

    ``allreduce_func`` takes gradients and variables, and returns the combined gradients. InvalidRequestError unless
    ``backward_passes_per_step`` is a positive integer. ``rank``, ``optimizer_type``, ``process_set`` and
    ``scale_local_gradients`` are there for Horovod's callers: ``allreduce_func`` knows them.
    """

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        rank: int | None = None,
        optimizer_type: str = "",
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        check_passes(backward_passes_per_step)
        self.backward_passes_per_step = backward_passes_per_step
        self.allreduce_func = allreduce_func
        self.sparse_as_dense = sparse_as_dense
        self.average_aggregated_gradients = average_aggregated_gradients
        self.counter: Any = None
        self._name = name or "aggregation"
        self._sums: list[Any] = []
        self._is_last: Any = None

    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """In the last pass the combined gradients; otherwise values that :meth:`apply_gradients` does not use.

        A gradient of None adds nothing: a variable may have one in some of the passes only.
        InvalidRequestError for an IndexedSlices without ``sparse_as_dense``.
        """
        dense = [self._dense(gradient, variable) for gradient, variable in zip(grads, vars, strict=True)]
        if self.backward_passes_per_step == 1:
            return list(self.allreduce_func(dense, vars))
        self._build(vars)
        self._is_last = tf.equal(self.counter.assign_add(1) % self.backward_passes_per_step, 0)
        pairs = zip(self._sums, dense, strict=True)
        totals = [total.read_value() if gradient is None else total.assign_add(gradient) for total, gradient in pairs]
        with tf.control_dependencies([self._is_last, *totals]):
            found = iter(tf.cond(self._is_last, lambda: self._combined(totals, vars), lambda: _zeros(totals, vars)))
        return list(found)

    def _combined(self, totals: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        divisor = self.backward_passes_per_step if self.average_aggregated_gradients else 1
        sums = [tf.convert_to_tensor(total) / divisor for total in totals]
        combined = self.allreduce_func(sums, variables)
        filled = [_zero(variable) if each is None else each for each, variable in zip(combined, variables, strict=True)]
        with tf.control_dependencies(filled):
            clear = [each.assign(tf.zeros_like(each)) for each in self._sums]
        with tf.control_dependencies(clear):
            return [tf.identity(each) for each in filled]

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call ``apply_grads_closure`` if this pass is the last one; otherwise only count ``global_step``."""
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()
        step = kwargs.get("global_step", args[1] if len(args) > 1 else None)

        def apply() -> Any:
            return _after(apply_grads_closure())

        def skip() -> Any:
            return _after(None if step is None else step.assign_add(1, read_value=False))

        return tf.cond(self._is_last, apply, skip)

    def _dense(self, gradient: Any, variable: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices) or self.backward_passes_per_step == 1:
            return gradient
        if not self.sparse_as_dense:
            raise InvalidRequestError(
                f"the gradient of {variable.name!r} is an IndexedSlices, and backward_passes_per_step="
                f"{self.backward_passes_per_step} adds up dense ones; give sparse_as_dense=True"
            )
        return TensorFlowLists.to_dense(gradient, targets_of([variable])[0])

    def _build(self, variables: Sequence[Any]) -> None:
        if self.counter is None:
            with tf.init_scope(), tf.name_scope(self._name):
                self.counter = _variable("counter", tf.zeros((), tf.int32))
                self._sums = [_variable("sum", tf.zeros(each.shape, each.dtype.base_dtype)) for each in variables]


class LocalGradientAggregationHelperEager(LocalGradientAggregationHelper):
    """The same, with the arguments of Horovod's helper for eager mode."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
        sparse_as_dense: bool = False,
        average_aggregated_gradients: bool = False,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        super().__init__(
            backward_passes_per_step,
            allreduce_func,
            sparse_as_dense,
            average_aggregated_gradients,
            process_set=process_set,
            scale_local_gradients=scale_local_gradients,
        )


def _variable(name: str, value: tf.Tensor) -> Any:
    return tf.compat.v1.Variable(value, trainable=False, name=name, use_resource=True)


def _zero(variable: Any) -> tf.Tensor:
    return tf.zeros(variable.shape, variable.dtype.base_dtype)


def _zeros(totals: Sequence[Any], variables: Sequence[Any]) -> list[tf.Tensor]:
    return [_zero(variable) for variable in variables]


def _after(operation: Any) -> tf.Tensor:
    """A value for both branches of a condition, which is there when ``operation`` has run."""
    is_node = isinstance(operation, tf.Operation | tf.Tensor)
    with tf.control_dependencies([operation] if is_node else []):
        return tf.constant(True)
