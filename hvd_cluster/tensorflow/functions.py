"""The same start on every rank: variables and objects from one rank to all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from hvd_cluster.comparison.meeting import refusing_list, require_same
from hvd_cluster.comparison.twins import model_of
from hvd_cluster.core import seeds
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops import objects
from hvd_cluster.tensorflow.errors import raised_by_tensorflow
from hvd_cluster.tensorflow.operations.broadcast import broadcast_values, naming_variables, require_variables

__all__ = [
    "BroadcastGlobalVariablesHook",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "set_seed",
]


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite ``variables`` with those of the global rank ``root_rank``; all ranks give them in the same order.

    In a graph the result is the operation that does it. ``inplace`` is accepted for compatibility: nothing is copied
    more often than necessary. HorovodInternalError, or what it becomes in TensorFlow, when the ranks' variables differ
    in number, shape or dtype; in eager mode it names the first difference, before anything is sent.
    """
    given = list(variables)
    if tf.executing_eagerly():
        with refusing_list("broadcast_variables", process_set):
            require_variables(given)
        with raised_by_tensorflow():
            require_same(model_of(given), "broadcast_variables", process_set)
    updates = broadcast_values(given, root_rank, None, process_set)
    return None if tf.executing_eagerly() else tf.group(*updates)


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """:func:`broadcast_variables` of all global variables of the graph; RuntimeError in eager mode, which has none."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables() is for graphs: eager mode has no list of all variables; use "
            "broadcast_variables(model.variables, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a session begins: for ``MonitoredTrainingSession(hooks=[...])``."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Add the operation to the graph, which is complete."""
        graph = tf.compat.v1.get_default_graph()
        if self._operation is None or self._operation.graph is not graph:
            with tf.device(self._device or None):
                self._operation = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it. FailedPreconditionError, with the name of the variable, where the ranks' variables differ."""
        with naming_variables(session.graph.get_collection(tf.compat.v1.GraphKeys.GLOBAL_VARIABLES)):
            session.run(self._operation)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The root's object on every rank: see :func:`hvd_cluster.ops.objects.broadcast_object`. ``session`` is unused."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """A function that broadcasts its argument, any number of times."""
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all members, in rank order. ``session`` is unused."""
    return objects.allgather_object(obj, name, process_set)


def set_seed(seed: int, *, same: bool = False) -> int:
    """Seed ``random``, NumPy, TensorFlow and, if it is imported, Keras. Returns the seed of this rank, below 2**32.

    Each rank gets another seed, made of ``seed`` and its rank, or ``seed`` itself if it is the ``same`` on all ranks. A
    run with the same seed and number of ranks draws the same numbers. Call it before layers and data sets are made:
    those that exist keep their seeds, and so does each ``tf.random.Generator``; give a new one the result.
    InvalidRequestError unless ``seed`` is an integer from 0 to 2**32 - 1, NotInitializedError before ``init()``, unless
    it is the ``same``.
    """
    return seeds.set_seed(seed, same, _seed_tensorflow)


def _seed_tensorflow(seed: int) -> None:
    if "keras" in sys.modules:
        tf.keras.utils.set_random_seed(seed)
    tf.random.set_seed(seed)
