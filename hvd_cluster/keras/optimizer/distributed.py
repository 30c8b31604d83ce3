"""The optimizer that combines gradients before its step."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import keras

from hvd_cluster.comparison.twins import stamp_of
from hvd_cluster.gradients.lists import ListBinding, ListCombiner
from hvd_cluster.gradients.targets import Target, positional
from hvd_cluster.keras.optimizer.passes import Passes

logger = logging.getLogger(__name__)

Tensor = Any


class Exchange:
    """How one optimizer combines its gradients."""

    def __init__(self, binding: ListBinding, combiner: ListCombiner, passes: Passes | None) -> None:
        self.combiner = combiner
        self.is_over = False
        self._binding = binding
        self.passes = passes
        self._variables: list[Any] = []
        self._targets: list[Target] = []

    def copy(self) -> Exchange:
        """For another optimizer, with the same options; sums of passes begin anew."""
        return Exchange(self._binding, self.combiner.copy(), self.passes and self.passes.copy())

    @contextmanager
    def over(self) -> Iterator[None]:
        """Inside, gradients that reach the optimizer are combined already."""
        self.is_over = True
        try:
            yield
        finally:
            self.is_over = False

    def combined(self, gradients: Sequence[Tensor | None], variables: Sequence[Any]) -> list[Tensor | None]:
        """The gradients of all ranks."""
        return self.combiner.combine(gradients, self._targets_of(variables))

    def run(
        self,
        gradients: Sequence[Tensor | None],
        variables: Sequence[Any],
        step: Callable[[list[Tensor | None]], None],
        other: Callable[[], None],
    ) -> None:
        """Call ``step`` with the combined gradients if this pass is the last one before a step, or else ``other``."""

        def last(gradients: Sequence[Tensor | None]) -> None:
            with self.over():
                step(self.combined(gradients, variables))

        if self.passes is None:
            last(gradients)
            return
        targets = self._targets_of(variables)
        self.passes.build(targets)
        self.passes.run(gradients, targets, self._binding, last, other)

    def _targets_of(self, variables: Sequence[Any]) -> list[Target]:
        known = self._variables
        if len(known) != len(variables) or any(a is not b for a, b in zip(known, variables, strict=True)):
            self._variables, self._targets = list(variables), targets_of(variables)
        return self._targets


class Distributed(keras.optimizers.Optimizer):  # type: ignore[misc]
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer."""

    _exchange: Exchange

    def apply(self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Combine ``grads`` over all ranks, and step. All ranks call it, with gradients of the same variables."""
        apply = super().apply
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if self._exchange.is_over or not grads or len(grads) != len(variables):
            apply(grads, trainable_variables)
            return
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        self._exchange.run(
            list(grads), variables, lambda combined: apply(combined, trainable_variables), self._count_pass
        )

    def stateless_apply(
        self, optimizer_variables: Sequence[Any], grads: Sequence[Tensor | None], trainable_variables: Sequence[Any]
    ) -> Any:
        """As :meth:`apply`, for JAX: returns the new values of the variables."""
        step = super().stateless_apply
        if self._exchange.is_over:
            return step(optimizer_variables, grads, trainable_variables)
        combined = self._exchange.combined(list(grads), self._trainable_variables)
        with self._exchange.over():
            return step(optimizer_variables, combined, trainable_variables)

    def _count_pass(self) -> None:
        """A pass without a step is an iteration, too."""
        counted: Any = getattr(self, "inner_optimizer", self)
        counted._iterations.assign_add(1)
        if self._exchange.passes is not None:
            self._exchange.passes.count_idle()

    def register_local_var(self, variable: Any) -> None:
        """The gradient of ``variable`` stays that of this rank. All ranks do the same."""
        self._exchange.combiner.keep_local(variable)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A distributed one with the same options; as of any optimizer, Keras copies no state of variables."""
        make, arguments = super().__reduce__()
        return wrap(make(*arguments), None, self._exchange.copy())

    def __reduce__(self) -> Any:
        """A pickle has the optimizer that is wrapped, as a file has, and a warning says so."""
        warn_of_pickle()
        _, arguments = super().__reduce__()
        return self.__class__._unpickle_model, arguments


def wrap(optimizer: Any, name: str | None, exchange: Exchange) -> Any:
    """``optimizer``, with all of its state, as an instance of a subclass of its class that uses ``exchange``."""
    base = type(optimizer)
    # Keras saves the class that __class__ names. type() and isinstance() see this one.
    members = {"__module__": base.__module__, "__class__": property(lambda self: base)}
    wrapped: Any = object.__new__(type(base.__name__, (Distributed, base), members))
    object.__setattr__(wrapped, "__dict__", optimizer.__dict__)
    wrapped.__dict__["_exchange"] = exchange
    if name is not None:
        wrapped.__dict__["name"] = name
    return wrapped


def warn_of_pickle() -> None:
    """Say that a copy by pickle steps on gradients of its own rank."""
    logger.warning(
        "a copy by pickle has the optimizer without its distribution, as a saved model has: its gradients stay on "
        "their rank; wrap that of the copy with hvd.DistributedOptimizer before it trains"
    )


def targets_of(variables: Sequence[Any]) -> list[Target]:
    """The targets of variables of Keras, or of its backend."""
    return [_target(variable, position) for position, variable in enumerate(variables)]


def _target(variable: Any, position: int) -> Target:
    dtype = keras.backend.standardize_dtype(variable.dtype)
    shape = tuple(variable.shape)
    name = getattr(variable, "path", None) or variable.name
    size = prod(shape) * _itemsize(dtype)
    return Target(id(variable), positional(name, position), shape, dtype, size, stamp_of(variable))


def _itemsize(dtype: str) -> int:
    """In bytes; NumPy does not know all types that Keras has."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1
