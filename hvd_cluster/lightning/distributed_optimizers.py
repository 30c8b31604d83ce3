"""When the gradients of a Trainer or a Fabric travel.

They are averages as soon as ``backward`` has returned, as with DDP, so clipping, hooks and callbacks see what the
optimizer sees. While gradients add up over several batches, only those of the last batch travel.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import hvd_cluster.torch as hvd
from hvd_cluster.gradients.options import Options
from hvd_cluster.lightning.module_state import names_of
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer

MANY_PASSES = 1 << 30
"""More backward passes than add up to one gradient: nothing is sent."""


class DistributedOptimizers:
    """The distributed optimizers of one strategy."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._pairs: list[tuple[weakref.ref[torch.optim.Optimizer], torch.optim.Optimizer | None]] = []
        self._is_paused = False

    def wrap(self, optimizer: Any, named: Iterable[tuple[str, torch.nn.Parameter]]) -> Any:
        """The distributed form of ``optimizer``; one that is distributed already, or none of torch's, stays.

        It is forgotten when nobody else uses it any more.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        wrapped, original = optimizer, None
        if not hasattr(optimizer, "_parameter_names"):
            names = names_of(optimizer, named)
            wrapped, original = hvd.DistributedOptimizer(optimizer, names, **vars(self.options)), optimizer
        alive = [pair for pair in self._pairs if pair[0]() is not None]
        self._pairs = [*alive, (weakref.ref(wrapped), original)]
        return wrapped

    def unwrap(self, optimizer: Any) -> Any:
        """What :meth:`wrap` got. The distributed form combines nothing any more: the next training has its own.

        A sharded one has its part of the state only, unless :meth:`unite` was called before.
        """
        original = next((original for wrapped, original in self._pairs if wrapped() is optimizer), None)
        self._pairs = [pair for pair in self._pairs if pair[0]() not in (optimizer, None)]
        if original is not None and isinstance(optimizer, HookedOptimizer):
            optimizer._combiner.release()
            if isinstance(optimizer, ShardedOptimizer):
                optimizer.unshare_parameters()
        return original or optimizer

    def unite(self) -> None:
        """Let this rank have the full state of each sharded optimizer that :meth:`wrap` has made. A collective."""
        for wrapped, original in self._pairs:
            if original is not None and isinstance(each := wrapped(), ShardedOptimizer):
                each.unite()

    def _hooked(self) -> list[HookedOptimizer]:
        """Those in use that combine gradients; Adasum combines in the step."""
        return [each for wrapped, _ in self._pairs if isinstance(each := wrapped(), HookedOptimizer)]

    def after_backward(self) -> None:
        """Combine the gradients of the optimizers that backward has reached, unless they still add up."""
        if self._is_paused:
            return
        for optimizer in self._hooked():
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
        for optimizer in self._hooked():
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


def followed(closure: Callable[[], Any], complete: Callable[[], None]) -> Callable[[], Any]:
    """``closure``, and then ``complete``."""

    def call() -> Any:
        result = closure()
        complete()
        return result

    return call
