"""When the gradients of a Trainer or a Fabric travel.

They are averages as soon as ``backward`` has returned, as with DDP, so clipping, hooks and callbacks see what the
optimizer sees. While gradients add up over several batches, only those of the last batch travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.gradients.options import Options
from hvd_cluster.lightning.module_state import names_of
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer

MANY_PASSES = 1 << 30
"""More backward passes than add up to one gradient: nothing is sent."""


class DistributedOptimizers:
    """The distributed optimizers of one strategy."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._originals: dict[int, torch.optim.Optimizer] = {}
        self._optimizers: list[Any] = []
        self._is_paused = False

    def wrap(self, optimizer: Any, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Any:
        """The distributed form of ``optimizer``; one that is distributed already, or none of torch's, stays."""
        if hasattr(optimizer, "_parameter_names") or not isinstance(optimizer, torch.optim.Optimizer):
            wrapped = optimizer
        else:
            wrapped = hvd.DistributedOptimizer(optimizer, names_of(optimizer, named), **vars(self.options))
            self._originals[id(wrapped)] = optimizer
        if isinstance(wrapped, HookedOptimizer):  # Adasum combines in its step
            self._optimizers.append(wrapped)
        return wrapped

    def unwrap(self, optimizer: Any) -> Any:
        """What :meth:`wrap` got. The distributed form combines nothing any more: the next training has its own."""
        self._optimizers = [each for each in self._optimizers if each is not optimizer]
        original = self._originals.pop(id(optimizer), optimizer)
        if original is not optimizer and isinstance(optimizer, HookedOptimizer):
            optimizer._combiner.release()
        return original

    def after_backward(self) -> None:
        """Combine the gradients of the optimizers that backward has reached, unless they still add up."""
        if self._is_paused:
            return
        for optimizer in self._optimizers:
            if optimizer._combiner.is_under_way:
                optimizer.synchronize()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backward inside adds up gradients on each rank."""
        self._set_passes(MANY_PASSES)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._set_passes(1)

    def _set_passes(self, passes: int) -> None:
        for optimizer in self._optimizers:
            optimizer.set_backward_passes_per_step(passes)

    @contextmanager
    def stepping(self, optimizer: Any) -> Iterator[Callable[[], None]]:
        """For the step of ``optimizer``, which combines nothing itself inside.

        The result is to be called when all gradients are there. It combines them, unless they are combined already:
        where backward was called through Lightning.
        """
        if not isinstance(optimizer, HookedOptimizer):
            yield _nothing
            return
        was_combined = optimizer._synchronized

        def complete() -> None:
            if not (was_combined or optimizer._synchronized):
                optimizer.set_backward_passes_per_step(1)
                optimizer.synchronize()

        with optimizer.skip_synchronize():
            yield complete


def _nothing() -> None:
    """Adasum combines in the step."""
