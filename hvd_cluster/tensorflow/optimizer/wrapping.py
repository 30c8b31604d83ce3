"""``DistributedOptimizer`` for the optimizers of TensorFlow: those of Keras 3 and of ``tf.compat.v1``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.lists import ListCombiner
from hvd_cluster.gradients.options import Groups, Options, as_groups, refuse_sharded
from hvd_cluster.ops.arguments import choose_op
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.optimizer.aggregation import LocalGradientAggregationHelper
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists, targets_of

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


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sharded: bool | str = False,
) -> Any:
    """Wrap ``optimizer``: it steps on gradients combined over all ranks of ``process_set``.

    An optimizer of Keras is wrapped by :func:`hvd_cluster.tensorflow.keras.DistributedOptimizer`, which has the meaning
    of the arguments. One of ``tf.compat.v1`` gets a wrapper that combines in ``compute_gradients``, in a session as in
    eager mode; with ``op=Adasum`` it steps on this rank alone, and ``apply_gradients`` combines the changes of the
    variables. With ``backward_passes_per_step`` n, gradients add up over n passes, and n - 1 of them only count
    ``global_step``.

    Raises InvalidRequestError for bad arguments and for ``sharded``, which only torch has; NotInitializedError before
    ``init()``.
    """
    refuse_sharded(sharded, "TensorFlow")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        arguments = dict(locals())
        from hvd_cluster.tensorflow.keras import DistributedOptimizer as of_keras

        del arguments["use_locking"]
        return of_keras(**arguments)
    options = Options(
        compression,
        choose_op(None, op),
        gradient_predivide_factor,
        as_groups(groups, num_groups, tf.Variable, "variable"),
        sparse_as_dense,
        process_set,
    )
    combiner = ListCombiner(TensorFlowLists(device_dense, device_sparse), options, scale_local_gradients)
    kind = type(optimizer).__name__
    if options.op is not ReduceOp.ADASUM:
        label = name or f"Distributed{kind}"
        passes = (backward_passes_per_step, average_aggregated_gradients)
        return GradientOptimizer(optimizer, label, use_locking, combiner, *passes)
    if backward_passes_per_step != 1 or average_aggregated_gradients:
        raise InvalidRequestError(
            "with op=Adasum each pass steps, and changes are combined; leave out backward_passes_per_step and "
            "average_aggregated_gradients"
        )
    return DeltaOptimizer(optimizer, name or f"DistributedDelta{kind}", use_locking, combiner)
