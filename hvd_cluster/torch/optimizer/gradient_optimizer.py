"""The optimizer that combines gradients before its step: while backward still runs, if a core is free for it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from collectives import InvalidRequestError, process_meter
from hvd_cluster.core import basics
from hvd_cluster.elastic.steps import watchers
from hvd_cluster.gradients.options import Options
from hvd_cluster.torch.mpi_ops import allreduce
from hvd_cluster.torch.optimizer.hooks import CHANGE_REMEDY, GradientCombiner
from hvd_cluster.torch.optimizer.inventory import Names


def _has_unscaled(caller: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``caller`` is a GradScaler after ``unscale_``, which leaves no trace in the gradients themselves."""
    states = getattr(caller, "_per_optimizer_states", {})
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


class HookedOptimizer(torch.optim.Optimizer):
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer."""

    _combiner: GradientCombiner
    _evaluates_first = False
    """Whether a step is under way that has changed nothing yet, because its closure still computes gradients."""

    def _distribute(self, names: Names, passes: int, options: Options) -> None:
        self._clear_flags()
        self._combiner = GradientCombiner(self, names, passes, options)

    def _clear_flags(self) -> None:
        self._skip = False
        self._synchronized = False
        self._combined_for_step = False
        self._combined_unasked = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the wrapped optimizer; the new gradients are combined, too. All ranks add the same groups."""
        super().add_param_group(param_group)
        self._combiner.adopt()

    @property
    def _parameter_names(self) -> Names:
        """The name of each parameter, as scripts read it from Horovod's optimizers."""
        return self._combiner.inventory.all_names

    @property
    def _given_names(self) -> Names:
        return self._combiner.inventory.given_names

    @property
    def _options(self) -> Options:
        return self._combiner.options

    @property
    def _passes(self) -> int:
        return self._combiner.progress.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        self._combiner.set_passes(passes)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until all gradients are combined; those that backward did not reach count as zeros.

        Does nothing on ranks outside of the process set, and in a world of one. Raises MismatchError, on all ranks,
        when the ranks have gradients of different kinds or sizes, HorovodInternalError when a rank is lost. Gradients
        that were changed since backward are combined as they are now, with a warning.
        """
        if basics.size() > 1:
            self._combiner.combine()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """``step()`` inside does not synchronize: for scripts that call :meth:`synchronize` themselves, to clip."""
        self._skip = True
        try:
            yield
        finally:
            self._skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Combine the gradients, then let the wrapped optimizer step; a closure's gradients are combined after it."""
        try:
            if closure is not None:
                return self._update_after(closure)
            if not (self._skip or self._combined_for_step):
                if self._synchronized:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() context after "
                        "optimizer.synchronize(): the gradients are combined twice, which costs time and, with op=Sum, "
                        "adds them up again. Call step() inside optimizer.skip_synchronize()",
                        stacklevel=2,
                    )
                self._combine_for_update()
            self._synchronized = self._combined_for_step = self._combined_unasked = False
            return self._update()
        finally:
            process_meter.count_step()

    def _update_after(self, closure: Callable[[], Any]) -> Any:
        """The step of the wrapped optimizer, which calls ``closure``, perhaps several times.

        torch's own optimizers change nothing before the first call. So a loss in it, as in each step of Lightning,
        finds the state as the last commit left it.
        """
        if not super().step.__module__.startswith("torch.optim"):
            return self._update(lambda: self._evaluate(closure))

        def evaluate() -> Any:
            loss = self._evaluate(closure)
            if self._evaluates_first:
                self._evaluates_first = False
                watchers.step_began()
            return loss

        self._evaluates_first = True
        try:
            return self._update(evaluate)
        finally:
            self._evaluates_first = False

    def _combine_for_update(self) -> None:
        """Combine the gradients as far as the update needs them."""
        self.synchronize()

    def _update(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of the wrapped optimizer."""
        return super().step(closure) if closure is not None else super().step()

    # Otherwise Optimizer.__setstate__ would put its hooks around this step as well as around the class's own step.
    step.hooked = True  # type: ignore[attr-defined]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._synchronized = False
        with torch.enable_grad():
            loss = closure()
        if not (self._skip or self._synchronized):
            self._combine_for_update()
        self._synchronized = False
        return self._joint(loss) if isinstance(self, torch.optim.LBFGS) else loss

    def _joint(self, loss: Any) -> torch.Tensor:
        """LBFGS decides by the loss, and all ranks must decide alike."""
        options = self._options
        here = torch.as_tensor(loss, device=getattr(loss, "device", "cpu")).detach()
        if not options.process_set.included():
            return here
        return allreduce(here, name="loss.LBFGS", op=options.op, process_set=options.process_set)

    def combine_for_step(self) -> None:
        """Combine the gradients now, unless they are; the next ``step()`` takes them as they are then."""
        if not (self._skip or self._is_combined()):
            self.synchronize()
            self._combined_unasked = True
        self._combined_for_step = True

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it looks for infinities; all ranks must see the same ones."""
        if not (self._skip or self._is_combined()):
            self.synchronize()
            self._synchronized = False
            self._require_scaled(sys._getframe(1).f_locals.get("self"))
            self._synchronized = self._combined_for_step = True
        elif self._combined_unasked:
            self._require_scaled(sys._getframe(1).f_locals.get("self"))
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _is_combined(self) -> bool:
        """Whether every trained parameter has a combined gradient; if one has none, other ranks would wait."""
        return self._synchronized and self._combiner.has_all_gradients()

    def _require_scaled(self, caller: Any) -> None:
        """InvalidRequestError if each rank has looked for infinities in its own gradients: some would not step."""
        if self._combiner.buckets and basics.size() > 1 and _has_unscaled(caller, self):
            raise InvalidRequestError(f"unscale_() was called before the gradients were combined; {CHANGE_REMEDY}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the wrapped optimizer; gradients that no step has used are forgotten, also those in flight."""
        self._combiner.throw_away()
        self._synchronized = self._combined_for_step = False
        super().zero_grad(set_to_none)

    def _discard(self) -> None:
        """Drop gradients that travel, because their step was cut off."""
        self._combiner.discard()
        self._clear_flags()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the wrapped optimizer; earlier gradients and the state of compressors are forgotten."""
        self._combiner.restart()
        self._clear_flags()
        super().load_state_dict(state_dict)
