"""Copies of models and of LossScaleOptimizers, which Keras makes through their saved form: with the plain optimizer.

A deep copy gets a distributed one again. A pickle may be read where no rank is: it stays plain, and a warning says so.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from hvd_cluster.keras.optimizer.distributed import Distributed, Exchange, warn_of_pickle, wrap

__all__ = ["adjust_copies", "finish_loss_scale", "finish_model", "is_distributed"]

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
