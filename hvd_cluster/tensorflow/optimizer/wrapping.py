"""``DistributedOptimizer`` for the optimizers of TensorFlow: those of Keras 3 and of ``tf.compat.v1``."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import InvalidRequestError, ReduceOp
from hvd_cluster.compression import GradientCompression
from hvd_cluster.operations.arguments import choose_op
from hvd_cluster.optimizer.lists import ListCombiner
from hvd_cluster.optimizer.options import Groups, Options, as_groups
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists
from hvd_cluster.tensorflow.optimizer.legacy import DeltaOptimizer, GradientOptimizer

__all__ = ["DistributedOptimizer"]


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
) -> Any:
    """Wrap ``optimizer``: it steps on gradients combined over all ranks of ``process_set``.

    An optimizer of Keras is wrapped by :func:`hvd_cluster.tensorflow.keras.DistributedOptimizer`, which has the meaning
    of the arguments. One of ``tf.compat.v1`` gets a wrapper that combines in ``compute_gradients``, in a session as in
    eager mode; with ``op=Adasum`` it steps on this rank alone, and ``apply_gradients`` combines the changes of the
    variables. With ``backward_passes_per_step`` n, gradients add up over n passes, and n - 1 of them only count
    ``global_step``.

    Raises InvalidRequestError for bad arguments, NotInitializedError before ``init()``.
    """
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from hvd_cluster.tensorflow.keras import DistributedOptimizer as of_keras

        return of_keras(
            optimizer,
            name,
            device_dense,
            device_sparse,
            compression,
            sparse_as_dense,
            gradient_predivide_factor,
            op,
            backward_passes_per_step,
            average_aggregated_gradients,
            num_groups,
            groups,
            process_set,
            scale_local_gradients,
        )
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
