"""The state of a training with Keras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import keras

from collectives import InvalidRequestError
from hvd_cluster.elastic import loop
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import HandledState, Registry, SamplerStateHandler, StateDictHandler
from hvd_cluster.elastic.loop import Recoverable
from hvd_cluster.elastic.parts import Part
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.elastic.shard_progress import ShardProgress
from hvd_cluster.elastic.steps import watchers
from hvd_cluster.keras.elastic.changes import watch
from hvd_cluster.keras.elastic.handlers import ModelHandler, OptimizerHandler
from hvd_cluster.keras.variables import build_optimizer, require_variables, settle

_REGISTRY: Registry = [
    (ElasticPartition, SamplerStateHandler),
    (GlobalBatches, StateDictHandler),
    (ShardProgress, StateDictHandler),
    (keras.Model, ModelHandler),
    (keras.optimizers.Optimizer, OptimizerHandler),
]


class KerasState(HandledState):
    """A model, its optimizer and other values of a training, see ObjectState::

        state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    Without ``optimizer``, it is that of ``model.compile()``, if there is one. Any keyword may have a model, an
    optimizer or a GlobalBatches, too. InvalidRequestError for a model without variables: call it on a batch first.

    ``commit()`` after each step costs little: it copies plain values and the variables that are not trained, but the
    others only where a loss might find them changed. That is so if a collective runs between the update of an optimizer
    and ``commit()``, or if the training function was traced before the first state was made. On JAX it is so, too, if a
    compiled step has another collective than that of its gradients, such as those of SyncBatchNormalization.

    Other optimizers than Keras' must not change the model, and a change by hand, such as ``set_weights``, counts from
    the next commit on: call ``state.save()`` after it.
    """

    def __init__(self, model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None, **kwargs: Any) -> None:
        _require_built(model)
        if optimizer is None:
            optimizer = build_optimizer(model)
        elif not optimizer.built:
            optimizer.build(model.trainable_variables)
        watch()
        super().__init__(_REGISTRY, model=model, optimizer=optimizer, **kwargs)
        watchers.add(self._snapshots)

    def _parts(self) -> Mapping[str, Part]:
        for name in self._names:
            settle(getattr(self, name))
        return super()._parts()


def _require_built(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidRequestError(f"model is a {type(model).__name__}; give a keras.Model")
    require_variables(model)


P = ParamSpec("P")
S = TypeVar("S", bound=Recoverable)
T = TypeVar("T")
Errors: TypeAlias = Callable[[], AbstractContextManager[object]]


def run(func: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """As :func:`hvd_cluster.elastic.run`. A collective that fails in a compiled step counts like any other; steps that
    are compiled already go on with the new ranks.
    """
    return loop.run_inside(_errors(), func)


def _errors() -> Errors:
    """A context manager that raises the engine's errors in place of the errors of the backend."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from hvd_cluster.tensorflow.errors import engine_errors as of_tensorflow

        return of_tensorflow
    if backend == "jax":
        from hvd_cluster.jax.calls import engine_errors as of_jax

        return of_jax
    return nullcontext
