"""DistributedOptimizer, for the Module API and for loops of one's own."""

from __future__ import annotations

from typing import Any

import mxnet as mx

from collectives import InvalidRequestError, override
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.mxnet.gradients import Compression, GradientExchange

OWN = ("_optimizer", "_exchange", "_arguments")


class DistributedOptimizer(mx.optimizer.Optimizer):  # type: ignore[misc]
    """An optimizer that averages gradients over the ranks before it hands them to ``optimizer``.

    It does all else as ``optimizer`` does, whose attributes it shares: one that is read or set here is the wrapped
    one's. A rank outside of ``process_set`` updates by its own gradients. ``num_groups``: the gradients of one call
    travel in so many groups. ``gradient_predivide_factor``: they are divided by it before the sum, and the sum by the
    rest of the number of ranks. InvalidRequestError, a ValueError, for a wrong argument; NotInitializedError before
    ``init()``.
    """

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not isinstance(optimizer, mx.optimizer.Optimizer):
            advice = "; for a gluon.Trainer use DistributedTrainer" if isinstance(optimizer, mx.gluon.Trainer) else ""
            raise InvalidRequestError(f"optimizer is a {type(optimizer).__name__}; give one of mx.optimizer{advice}")
        exchange = GradientExchange(Compression.none, gradient_predivide_factor, num_groups, process_set)
        self._arguments = gradient_predivide_factor, num_groups, process_set
        self._optimizer, self._exchange = optimizer, exchange

    def __getattr__(self, name: str) -> Any:
        if name in OWN:  # this one is being made by pickle
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return DistributedOptimizer, (self._optimizer, *self._arguments)

    def create_state(self, index: Any, weight: Any) -> Any:
        """As that of the wrapped optimizer."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """As that of the wrapped optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average ``grad`` in place, and update ``weight`` by it; lists of all for several parameters."""
        self._combine(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As :meth:`update`, with weights of float32 beside those of float16 if the optimizer has them."""
        self._combine(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _combine(self, index: Any, grad: Any) -> None:
        is_list = isinstance(index, list | tuple)
        self._exchange.combine(list(zip(index, grad, strict=True)) if is_list else [(index, grad)])
