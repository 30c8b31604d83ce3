"""The state of a training with Keras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from collectives.api import InvalidRequestError
from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.handlers import HandledState, Registry, SamplerStateHandler, StateDictHandler
from hvd_cluster.elastic.parts import Part
from hvd_cluster.elastic.portions import Portions
from hvd_cluster.elastic.sampler import ElasticPartition
from hvd_cluster.elastic.watchers import watchers
from hvd_cluster.keras.elastic.handlers import ModelHandler, OptimizerHandler
from hvd_cluster.keras.elastic.steps import watch
from hvd_cluster.keras.variables import build_optimizer, require_variables, settle

__all__ = ["KerasState"]

_REGISTRY: Registry = [
    (ElasticPartition, SamplerStateHandler),
    (GlobalBatches, StateDictHandler),
    (Portions, StateDictHandler),
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
        watchers.add(self)

    def _parts(self) -> Mapping[str, Part]:
        for name in self._names:
            settle(getattr(self, name))
        return super()._parts()


def _require_built(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise InvalidRequestError(f"model is a {type(model).__name__}; give a keras.Model")
    require_variables(model)
