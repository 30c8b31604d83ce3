"""The state of a training with variables of TensorFlow, without Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy.typing as npt
import tensorflow as tf

from collectives import InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.elastic import loop
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import HandledState, Registry, SnapshotHandler, StateDictHandler
from hvd_cluster.elastic.loop import Recoverable
from hvd_cluster.elastic.shard_progress import ShardProgress
from hvd_cluster.keras.elastic.state import KerasState
from hvd_cluster.ops.arrays import broadcast_all
from hvd_cluster.tensorflow.errors import engine_errors


class Variables:
    """Variables of eager mode, or of the graph of a ``session``."""

    def __init__(self, variables: Sequence[Any], session: Any = None) -> None:
        self.all = list(variables)
        self.session = session

    def read(self) -> list[npt.NDArray[Any]]:
        """A copy of the values of each."""
        if self.session is not None:
            arrays: list[npt.NDArray[Any]] = self.session.run(self.all)
            return arrays
        return [variable.numpy() for variable in self.all]

    def write(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Give each its values; the arrays may be changed later."""
        for variable, array in zip(self.all, arrays, strict=True):
            if self.session is None:
                variable.assign(array.copy())
            else:
                variable.load(array, self.session)


class VariablesHandler(SnapshotHandler):
    """For :class:`Variables`: they may change at any time, so each commit copies them."""

    value: Variables

    @override
    def light(self) -> list[npt.NDArray[Any]]:
        return self.value.read()

    @override
    def put_light(self, light: list[npt.NDArray[Any]]) -> None:
        self.value.write(light)

    @override
    def layout(self) -> list[tuple[str, str]]:
        return [
            (f"variable {number}", f"{each.dtype.base_dtype.name} {tuple(each.shape)}")
            for number, each in enumerate(self.value.all)
        ]

    @override
    def share(self, root_rank: int) -> None:
        values = broadcast_all(self.value.read(), root_rank, "state.variables")
        if basics.rank() != root_rank:
            self.value.write(values)


_REGISTRY: Registry = [
    (GlobalBatches, StateDictHandler),
    (ShardProgress, StateDictHandler),
    (Variables, VariablesHandler),
]


class TensorFlowState(HandledState):
    """Variables of TensorFlow and other values of a training, see ObjectState::

        state = hvd.elastic.TensorFlowState([weights, bias], batch=0)

    ``variables`` are all global ones of the graph by default. ``session`` is that of a ``tf.compat.v1`` graph; in eager
    mode give None, and the variables. Each commit copies them: TensorFlow does not tell when they change. A model of
    Keras goes into a TensorFlowKerasState.

    InvalidRequestError for no variables.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        found = tf.compat.v1.global_variables() if variables is None else list(variables)
        if not found:
            raise InvalidRequestError("there are no variables; in eager mode, give them: TensorFlowState([v, w])")
        super().__init__(_REGISTRY, variables=Variables(found, session), **kwargs)


class TensorFlowKerasState(KerasState):
    """A :class:`~hvd_cluster.keras.elastic.KerasState`; ``backend`` is accepted for compatibility and not needed."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a graph counts like any other; functions that are
    traced already go on with the new ranks.
    """
    return loop.run_inside(engine_errors, func)
