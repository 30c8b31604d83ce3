"""``tf.GradientTape`` with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from collectives import InvalidRequestError, ReduceOp
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.gradients.compression import GradientCompression
from hvd_cluster.gradients.lists import ListCombiner
from hvd_cluster.gradients.options import Groups, Options, as_groups
from hvd_cluster.gradients.targets import Target, trainable_weights
from hvd_cluster.ops.arguments import choose_op
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.optimizer.binding import TensorFlowLists, target_of, targets_of


class _DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """The first base of a wrapped tape's class; the second is the class of the tape."""

    _combiner: ListCombiner

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """The gradients of ``target``, combined over all ranks, in the structure of ``sources``.

        With ``use_generic_names`` they travel as grad_0, grad_1...: for ranks whose variables have other names.
        """
        found = super().gradient(target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        targets = _generic_targets(flat) if use_generic_names else targets_of(flat)
        combined = self._combiner.combine(tf.nest.flatten(found), targets)
        return tf.nest.pack_sequence_as(sources, combined)

    def register_local_source(self, source: Any) -> None:
        """The gradient of the variable ``source`` stays that of this rank. All ranks do the same."""
        self._combiner.keep_local(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Two lists of (variable, gradient): of the local sources, and of the others."""
        flat = tf.nest.flatten(sources)
        pairs = list(zip(flat, self.gradient(target, flat, output_gradients, use_generic_names), strict=True))
        local = [pair for pair in pairs if self._combiner.is_local(pair[0])]
        return local, [pair for pair in pairs if not self._combiner.is_local(pair[0])]


def _generic_targets(sources: Sequence[Any]) -> list[Target]:
    return [target_of(source, f"grad_{number}") for number, source in enumerate(sources)]


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap ``gradtape``, before or after it records: ``gradient()`` then combines gradients over all ranks.

    The result is an instance of a subclass of the tape's own class, and shares its recording. In a ``tf.function``
    gradients travel while backward goes on: small ones in buckets, the last variable first. Average divides by the
    size of ``process_set``; ``gradient_predivide_factor`` is the part of this division that comes before the sum.
    ``groups`` is the number of groups of gradients, or a list of variables for each group: a group travels together.
    ``num_groups`` is its deprecated name. An IndexedSlices stays one, and is not compressed, unless
    ``sparse_as_dense``; where it is one, it must be one on all ranks.

    A source without a gradient on this rank gets that of the other ranks, or zeros. Gradients of local sources, see
    ``register_local_source``, are divided by the size of ``process_set`` if ``scale_local_gradients``, so that all
    gradients are those of the average loss.

    Raises InvalidRequestError for bad arguments, NotInitializedError before ``init()``.
    """
    if not isinstance(gradtape, tf.GradientTape) or isinstance(gradtape, _DistributedTape):
        raise InvalidRequestError(f"cannot wrap a {type(gradtape)}; give a tf.GradientTape that is not wrapped yet")
    options = Options(
        compression,
        choose_op(None, op),
        gradient_predivide_factor,
        as_groups(groups, num_groups, object, "variable"),
        sparse_as_dense,
        process_set,
    )
    combiner = ListCombiner(TensorFlowLists(device_dense, device_sparse), options, scale_local_gradients)
    return _wrap(gradtape, combiner)


def _wrap(tape: tf.GradientTape, combiner: ListCombiner) -> _DistributedTape:
    base = type(tape)
    wrapped: Any = object.__new__(type(base.__name__, (_DistributedTape, base), {"__module__": base.__module__}))
    wrapped.__dict__ = tape.__dict__
    wrapped._combiner = combiner
    result: _DistributedTape = wrapped
    return result


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: GradientCompression = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """As :func:`DistributedGradientTape`; the gradients of the weights of ``local_layers`` stay those of this rank.

    ``local_layers`` is a built Keras layer or a list of them; InvalidRequestError for anything else.
    """
    arguments = dict(locals())
    del arguments["local_layers"]
    wrapped = DistributedGradientTape(**arguments)
    for variable in trainable_weights(local_layers):
        wrapped.register_local_source(variable)
    return wrapped
