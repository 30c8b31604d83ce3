"""The three places where Keras itself must know of a distributed optimizer.

A deep copy gets a distributed one again. A pickle may be read where no rank is: it stays plain, and a warning says so.

TensorFlow's XLA cannot compile collectives everywhere, such as on a GPU. There a model with such an optimizer is not
compiled, and a warning says why: ``compile()`` asks whether a model supports it.

A LossScaleOptimizer, in which ``compile()`` wraps the optimizer of a model in mixed_float16, looks for infinities in
gradients before its inner optimizer gets them. Each rank would decide alone whether to step, and those that do would
wait for the others. So gradients are combined first, while they are scaled.

A model or a LossScaleOptimizer is copied as it is saved: see :mod:`hvd_cluster.keras.optimizer.adjustments`.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import keras

from hvd_cluster.keras.optimizer.distributed import Distributed, Exchange, warn_of_pickle, wrap

logger = logging.getLogger(__name__)


_copies_deeply: ContextVar[bool] = ContextVar("_copies_deeply", default=False)


def is_distributed(optimizer: Any) -> bool:
    """Whether it is wrapped, inside or outside of a LossScaleOptimizer."""
    return _exchange_of(optimizer) is not None


def _exchange_of(optimizer: Any) -> Exchange | None:
    found = optimizer if isinstance(optimizer, Distributed) else getattr(optimizer, "inner_optimizer", None)
    return found._exchange if isinstance(found, Distributed) else None


def adjust_copies(kind: Any, optimizer_of: Callable[[Any], Any], finish: Callable[[Any, Any, Exchange], None]) -> None:
    """Let ``kind``, a class of Keras, copy its objects as this module says.

    ``optimizer_of`` returns the optimizer of an object, and ``finish(original, copied, exchange)`` makes that of a deep
    copy distributed.
    """
    reduce = kind.__reduce__

    @functools.wraps(reduce)
    def warned_reduce(self: Any) -> Any:
        is_pickle = not (isinstance(self, Distributed) or _copies_deeply.get())  # the former warns itself
        if is_pickle and is_distributed(optimizer_of(self)):
            warn_of_pickle()
        return reduce(self)

    def deep_copy(self: Any, memo: dict[int, Any]) -> Any:
        token = _copies_deeply.set(True)
        try:
            copied = copy._reconstruct(self, memo, *self.__reduce_ex__(4))  # type: ignore[attr-defined]
        finally:
            _copies_deeply.reset(token)
        exchange = _exchange_of(optimizer_of(self))
        if exchange is not None:
            finish(self, copied, exchange.copy())
        return copied

    kind.__reduce__, kind.__deepcopy__ = warned_reduce, deep_copy


def finish_model(model: Any, copied: Any, exchange: Exchange) -> None:
    """Distribute the optimizer of ``copied``; its variables are local where those of ``model`` are."""
    for original, variable in zip(model.variables, copied.variables, strict=True):
        if exchange.combiner.is_local(original):
            exchange.combiner.keep_local(variable)
    if isinstance(model.optimizer, Distributed):
        copied.optimizer = wrap(copied.optimizer, None, exchange)
    else:
        finish_loss_scale(model.optimizer, copied.optimizer, exchange)
    copied.jit_compile = model.jit_compile


def finish_loss_scale(_: Any, copied: Any, exchange: Exchange) -> None:
    """Distribute the inner optimizer of ``copied``."""
    copied.inner_optimizer = wrap(copied.inner_optimizer, None, exchange)


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

    from hvd_cluster.keras.backends.on_tensorflow import why_not_compiled

    ask = getattr(trainer, "model_supports_jit", None)
    if ask is None:
        logger.warning("this Keras does not ask whether XLA can compile a model; call compile(jit_compile=False)")
        return

    @functools.wraps(ask)
    def model_supports_jit(model: Any) -> bool:
        supported = bool(ask(model))
        if not supported or not is_distributed(getattr(model, "optimizer", None)):
            return supported
        reason = why_not_compiled()
        if reason is not None:
            logger.warning("a model with a distributed optimizer is not compiled with XLA: %s", reason)
        return reason is None

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
