"""From an optimizer of Keras to a distributed one of the same class."""

from __future__ import annotations

from typing import Any

import keras

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.lists import ListCombiner
from hvd_cluster.gradients.options import Groups, Options, as_groups, check_passes, refuse_sharded
from hvd_cluster.gradients.targets import trainable_weights
from hvd_cluster.keras.backends import backend
from hvd_cluster.keras.compression import Compression
from hvd_cluster.keras.optimizer.adjustments import adjust
from hvd_cluster.keras.optimizer.distributed import Distributed, Exchange, wrap
from hvd_cluster.keras.optimizer.passes import Passes
from hvd_cluster.ops.arguments import choose_op


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    sharded: bool | str = False,
) -> Any:
    """Wrap ``optimizer``, of Keras 3 on any backend: it steps on gradients combined over all ranks of ``process_set``.

    The result is an instance of a subclass of the optimizer's own class, and shares its state: variables, learning
    rate, iterations. It is saved like ``optimizer``, so that a saved model loads without this package. Clipping, weight
    decay, EMA and ``gradient_accumulation_steps`` act on the combined gradients. With TensorFlow, ``model.fit`` builds
    a graph, which XLA compiles only where it can call collectives; a LossScaleOptimizer may be inside or outside, and
    all ranks skip the same steps.

    ``op`` is Average or Sum. Average divides by the size of ``process_set``; ``gradient_predivide_factor`` is the part
    of this division that comes before the sum. ``groups`` is the number of groups of gradients, or a list of variables
    for each group: a group travels together. ``num_groups`` is its deprecated name. An IndexedSlices stays one, and is
    not compressed, unless ``sparse_as_dense``. A variable without a gradient on this rank gets that of the other
    ranks, or zeros.

    With ``backward_passes_per_step`` n, gradients of n calls of ``apply`` add up on this rank, or are averaged if
    ``average_aggregated_gradients``, and the last call combines them and steps. On JAX use the optimizer's own
    ``gradient_accumulation_steps`` instead. ``device_dense`` and ``device_sparse`` are devices of TensorFlow.
    Gradients of local variables, see ``register_local_var``, are divided by the size of ``process_set`` if
    ``scale_local_gradients``. ``name`` becomes the name of the optimizer.

    Raises InvalidRequestError for bad arguments and for ``sharded``, which only torch has; NotInitializedError before
    ``init()``.
    """
    refuse_sharded(sharded, "Keras")
    _require_plain(optimizer)
    options = Options(
        compression,
        _gradient_op(op),
        gradient_predivide_factor,
        as_groups(groups, num_groups, keras.Variable, "variable"),
        sparse_as_dense,
        process_set,
    )
    check_passes(backward_passes_per_step)
    passes = _passes(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
    binding = backend().lists(device_dense, device_sparse)
    exchange = Exchange(binding, ListCombiner(binding, options, scale_local_gradients), passes)
    adjust()
    return wrap(optimizer, name, exchange)


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`DistributedOptimizer`; the gradients of the weights of ``local_layers`` stay those of this rank.

    ``local_layers`` is a built Keras layer or a list of them; InvalidRequestError for anything else.
    """
    arguments = dict(locals())
    local = trainable_weights(arguments.pop("local_layers"))
    wrapped = DistributedOptimizer(**arguments)
    for variable in local:
        wrapped.register_local_var(variable)
    return wrapped


def _require_plain(optimizer: Any) -> None:
    inner = getattr(optimizer, "inner_optimizer", None)
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, Distributed):
        raise InvalidRequestError(
            f"cannot wrap a {type(optimizer)}; give an optimizer of Keras 3 that is not wrapped yet"
        )
    if isinstance(inner, Distributed):
        raise InvalidRequestError("the inner optimizer of this LossScaleOptimizer is distributed already; wrap one")


def _gradient_op(op: Any) -> ReduceOp:
    chosen = choose_op(None, op)
    if chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(
            f"op {chosen.name.capitalize()} is not available for optimizers of Keras; use Average or Sum"
        )
    return chosen


def _passes(count: int, is_average: bool, sparse_as_dense: bool) -> Passes | None:
    if count == 1:
        return None
    if keras.backend.backend() == "jax":
        raise InvalidRequestError(
            f"backward_passes_per_step={count} is not available on JAX; make the optimizer with "
            f"gradient_accumulation_steps={count}"
        )
    return Passes(count, is_average, sparse_as_dense)
