"""Adds up the gradients of several backward passes on this rank, before they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from collectives import InvalidRequestError
from hvd_cluster.gradients.lists import ListBinding
from hvd_cluster.gradients.targets import Target
from hvd_cluster.keras.variables import view

Tensor = Any


class Passes:
    """Of every ``count`` passes the last one acts on the sum of the gradients, or on their average.

    The sums are variables, so that a graph can update them; they are no part of the optimizer's state.
    """

    def __init__(self, count: int, is_average: bool, sparse_as_dense: bool) -> None:
        self.count = count
        self._divisor = count if is_average else 1
        self._sparse_as_dense = sparse_as_dense
        self._done: Any = None
        self._idle: Any = None
        self._sums: list[Any] = []

    def copy(self) -> Passes:
        """For another optimizer, without the sums."""
        return Passes(self.count, self._divisor == self.count, self._sparse_as_dense)

    def build(self, targets: Sequence[Target]) -> None:
        """Make the variables at the first call."""
        if self._done is None:
            self._done, self._idle = _variable((), "int32"), _variable((), "int64")
            self._sums = [_variable(target.shape, str(target.dtype)) for target in targets]

    def run(
        self,
        gradients: Sequence[Tensor | None],
        targets: Sequence[Target],
        binding: ListBinding,
        last: Callable[[list[Tensor | None]], None],
        other: Callable[[], None],
    ) -> None:
        """Add ``gradients``. Call ``last`` with the sums if this is the last pass, or else ``other``.

        A gradient of None adds nothing: a variable may have one in some of the passes only. In a graph both are built,
        and one of them runs. InvalidRequestError for a sparse gradient without ``sparse_as_dense``, and for other
        variables than at the first call.
        """
        if len(targets) != len(self._sums):
            raise InvalidRequestError(
                f"backward_passes_per_step={self.count} adds up gradients of the {len(self._sums)} variables of the "
                f"first pass, not of {len(targets)}; give apply() the same variables in each pass"
            )
        for total, gradient, target in zip(self._sums, gradients, targets, strict=True):
            if gradient is not None:
                total.assign_add(self._dense(gradient, target, binding))
        self._done.assign_add(1)

        def act() -> None:
            last([total.value / self._divisor for total in self._sums])
            self.clear()

        keras.ops.cond(keras.ops.equal(self._done.value % self.count, 0), act, other)

    @property
    def idle(self) -> int:
        """The number of passes that have changed no variable of a model."""
        return 0 if self._idle is None else int(view(self._idle))

    @idle.setter
    def idle(self, count: int) -> None:
        if self._idle is not None:
            self._idle.assign(count)

    def count_idle(self) -> None:
        """One more of them."""
        self._idle.assign_add(1)

    def _dense(self, gradient: Tensor, target: Target, binding: ListBinding) -> Tensor:
        if not binding.is_sparse(gradient):
            return gradient
        if not self._sparse_as_dense:
            raise InvalidRequestError(
                f"the gradient of {target.name!r} is sparse, and backward_passes_per_step={self.count} adds up dense "
                "ones; give DistributedOptimizer sparse_as_dense=True"
            )
        return binding.to_dense(gradient, target)

    def clear(self) -> None:
        """Begin anew, also before the first call."""
        for each in (self._done, *self._sums):
            if each is not None:
                each.assign(keras.ops.zeros_like(each))


def _variable(shape: Any, dtype: str) -> Any:
    return keras.Variable("zeros", shape=shape, dtype=dtype, trainable=False, name="passes")
