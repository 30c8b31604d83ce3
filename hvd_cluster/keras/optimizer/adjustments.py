"""The three places where Keras itself must know of a distributed optimizer.

TensorFlow's XLA cannot compile collectives, so a model with such an optimizer is not compiled: ``compile()`` asks
whether a model supports it.

A LossScaleOptimizer, in which ``compile()`` wraps the optimizer of a model in mixed_float16, looks for infinities in
gradients before its inner optimizer gets them. Each rank would decide alone whether to step, and those that do would
wait for the others. So gradients are combined first, while they are scaled.

A model or a LossScaleOptimizer is copied as it is saved: see :mod:`hvd_cluster.keras.optimizer.copies`.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras

from hvd_cluster.keras.optimizer.copies import adjust_copies, finish_loss_scale, finish_model, is_distributed
from hvd_cluster.keras.optimizer.distributed import Distributed

__all__ = ["adjust"]

logger = logging.getLogger(__name__)


@functools.cache
def adjust() -> None:
    """Let Keras know; once in a process."""
    _adjust_loss_scaling(keras.optimizers.LossScaleOptimizer)
    adjust_copies(keras.Model, lambda model: getattr(model, "optimizer", None), finish_model)
    adjust_copies(keras.optimizers.LossScaleOptimizer, lambda optimizer: optimizer, finish_loss_scale)
    if keras.backend.backend() == "tensorflow":
        _adjust_compilation()


def _adjust_compilation() -> None:
    from keras.src.trainers import trainer

    ask = getattr(trainer, "model_supports_jit", None)
    if ask is None:
        logger.warning("this Keras does not ask whether XLA can compile a model; call compile(jit_compile=False)")
        return

    @functools.wraps(ask)
    def model_supports_jit(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)
        return not is_distributed(optimizer) and bool(ask(model))

    trainer.model_supports_jit = model_supports_jit


def _adjust_loss_scaling(kind: Any) -> None:
    apply, stateless_apply = kind.apply, kind.stateless_apply

    @functools.wraps(apply)
    def combined_apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed) or not grads:
            apply(self, grads, trainable_variables)
            return
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        inner._exchange.run(
            list(grads), variables, lambda combined: apply(self, combined, trainable_variables), inner._count_pass
        )

    @functools.wraps(stateless_apply)
    def combined_stateless_apply(self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            return stateless_apply(self, optimizer_variables, grads, trainable_variables)
        combined = inner._exchange.combined(list(grads), self._trainable_variables)
        with inner._exchange.over():
            return stateless_apply(self, optimizer_variables, combined, trainable_variables)

    kind.apply, kind.stateless_apply = combined_apply, combined_stateless_apply
