"""TensorFlow's gradients, as the optimizer core sees them: in eager mode, and as nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from collectives import ReduceOp, override
from hvd_cluster.comparison.rosters import Roster
from hvd_cluster.comparison.twins import stamp_of
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding, Shipment, by_shipment
from hvd_cluster.gradients.targets import Target, positional
from hvd_cluster.ops.arguments import Reduction
from hvd_cluster.tensorflow.errors import engine_error, raised_by_tensorflow
from hvd_cluster.tensorflow.operations.allgather import _grouped_allgather
from hvd_cluster.tensorflow.operations.allreduce import GROUPED_OP, OP
from hvd_cluster.tensorflow.operations.calls import combine, combine_group, combine_together
from hvd_cluster.tensorflow.operations.members import size_op
from hvd_cluster.tensorflow.xla.scope import is_compiled


class TensorFlowLists(ListBinding):
    """In a graph each shipment is a node, which runs when its gradients are there: while backward goes on.

    ``device_dense`` and ``device_sparse`` are devices of TensorFlow; by default each tensor stays where it is.
    """

    def __init__(self, device_dense: str = "", device_sparse: str = "") -> None:
        self._device_dense = device_dense
        self._device_sparse = device_sparse

    @staticmethod
    @override
    def is_deferred() -> bool:
        return not tf.executing_eagerly()

    @staticmethod
    @override
    def is_sparse(gradient: Any) -> bool:
        return isinstance(gradient, tf.IndexedSlices)

    @staticmethod
    @override
    def to_dense(gradient: tf.IndexedSlices, target: Target) -> tf.Tensor:
        if target.shape is None:
            return tf.convert_to_tensor(gradient)
        return tf.math.unsorted_segment_sum(gradient.values, gradient.indices, target.shape[0])

    @staticmethod
    @override
    def zeros(target: Target, like: Any) -> tf.Tensor:
        return tf.zeros(target.shape, target.dtype)

    @staticmethod
    @override
    def reshape(tensor: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
        return tf.reshape(tensor, shape)

    @staticmethod
    @override
    def concatenate(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat(tensors, 0)

    @staticmethod
    @override
    def split(packed: tf.Tensor, sizes: Sequence[int]) -> Sequence[tf.Tensor]:
        parts: Sequence[tf.Tensor] = tf.split(packed, sizes)
        return parts

    @override
    def allreduce(
        self, shipments: Sequence[Shipment], process_set: ProcessSet, how: Reduction
    ) -> Sequence[Sequence[tf.Tensor]]:
        """In eager mode all travel as one group, because each call waits for its result."""
        with _on(self._device_dense):
            if not tf.executing_eagerly() and is_compiled():
                return combine_together([(*_op_of(each), _naming_of(each)) for each in shipments], how, process_set)
            if not tf.executing_eagerly() or len(shipments) < 2:
                return [_combined(shipment, process_set, how) for shipment in shipments]
            everything = [tensor for shipment in shipments for tensor in shipment.tensors]
            joint = Shipment(shipments[0].name, everything, tag=shipments[0].tag)
            return by_shipment(_combined(joint, process_set, how), shipments)

    @staticmethod
    @override
    def comparing() -> AbstractContextManager[None]:
        return raised_by_tensorflow()

    @staticmethod
    @override
    def engine_error(error: Exception) -> BaseException | None:
        return engine_error(error)

    @override
    def gather(
        self, gradient: tf.IndexedSlices, name: str, op: ReduceOp, process_set: ProcessSet, roster: Roster | None
    ) -> tf.IndexedSlices:
        with _on(self._device_sparse):
            values = self._of_average(gradient.values, process_set) if op is ReduceOp.AVERAGE else gradient.values
            # In one group, so that no rank has the values of one step and the indices of another.
            both = [values, gradient.indices]
            values, indices = _grouped_allgather(both, f"{name}.slices", False, process_set, roster=roster)
        return tf.IndexedSlices(values, indices, gradient.dense_shape)

    @override
    def share(self, gradient: Any, process_set: ProcessSet) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = self._of_average(gradient.values, process_set)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return self._of_average(gradient, process_set)

    @staticmethod
    def _of_average(tensor: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
        """Divided when the graph runs, because the number of ranks may change."""
        return tensor / tf.cast(size_op(process_set.process_set_id or 0), tensor.dtype)


def _on(device: str) -> AbstractContextManager[Any]:
    scope: AbstractContextManager[Any] = tf.device(device or None)
    return scope


def _combined(shipment: Shipment, process_set: ProcessSet, how: Reduction) -> Sequence[tf.Tensor]:
    naming = _naming_of(shipment)
    if shipment.is_alone:
        return [combine(OP, shipment.tensors[0], how, process_set, **naming)]
    return combine_group(GROUPED_OP, shipment.tensors, how, process_set, **naming)


def _naming_of(shipment: Shipment) -> dict[str, Any]:
    # A script may have several tapes, in functions that run at the same time, whose gradients have equal names.
    return {"name": shipment.name, "roster": shipment.roster, "tag": shipment.tag}


def _op_of(shipment: Shipment) -> tuple[str, Sequence[tf.Tensor]]:
    return OP if shipment.is_alone else GROUPED_OP, shipment.tensors


def target_of(variable: Any, name: str) -> Target:
    """``variable`` may be a variable of TensorFlow or of Keras, or a tensor."""
    dtype, shape = tf.as_dtype(variable.dtype), tf.TensorShape(variable.shape)
    if not shape.is_fully_defined():
        return Target(id(variable), name, None, dtype, None)
    return Target(id(variable), name, tuple(shape), dtype, shape.num_elements() * dtype.size, stamp_of(variable))


def targets_of(variables: Iterable[Any]) -> list[Target]:
    """The targets of ``variables``, called by the names and the positions of these."""
    return [target_of(variable, _name_of(variable, position)) for position, variable in enumerate(variables)]


def _name_of(variable: Any, position: int) -> str:
    name = getattr(variable, "path", None) or (variable.name if hasattr(variable, "handle") else None)
    return positional(str(name), position) if name else f"source_{position}"
