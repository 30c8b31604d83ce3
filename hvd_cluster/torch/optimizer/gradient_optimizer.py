"""The optimizer that combines gradients before its step: while backward still runs, if a core is free for it."""

from __future__ import annotations

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.utils.hooks import RemovableHandle

from collectives.api import HorovodInternalError, InvalidRequestError
from hvd_cluster.basics import engine, size
from hvd_cluster.compression import GradientCompressor, compressor_for
from hvd_cluster.optimizer.buckets import label, plan
from hvd_cluster.optimizer.names import complete_names
from hvd_cluster.optimizer.options import Options, check_passes
from hvd_cluster.optimizer.ordinals import Ordinals
from hvd_cluster.process_sets import ProcessSet
from hvd_cluster.torch.mpi_ops import allreduce
from hvd_cluster.torch.optimizer.buckets import Bucket, size_of
from hvd_cluster.torch.optimizer.parameters import Names, parameter_groups
from hvd_cluster.torch.optimizer.reduction import Reduction

__all__ = ["GradientOptimizer"]

logger = logging.getLogger(__name__)

CHANGE_REMEDY = (
    "call optimizer.synchronize() before gradients are changed, be it to clip or to unscale them, and then "
    "step(), or scaler.step(), inside optimizer.skip_synchronize()"
)
SEND_REMEDY = (
    "call step() or synchronize() first, on all ranks, also after a backward that failed. Where a backward computes "
    "gradients by the way only, as a generator's those of its discriminator, call requires_grad_(False) on these "
    "parameters before its forward, and requires_grad_(True) after it"
)


def _hook(parameter: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call the method ``on_gradient`` when a gradient is complete, as long as the object of the method is in use."""
    method = weakref.WeakMethod(on_gradient)

    def hook(parameter: torch.Tensor) -> None:
        on_gradient = method()
        if on_gradient is None:
            handle.remove()
        else:
            on_gradient(parameter)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


_ordinals: Ordinals[GradientOptimizer] = Ordinals()


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    """Identity and version of the gradient: one of them changes when the gradient is replaced or changed in place."""
    gradient = parameter.grad
    return id(gradient), 0 if gradient is None else gradient._version


def _has_unscaled(caller: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``caller`` is a GradScaler after ``unscale_``, which leaves no trace in the gradients themselves."""
    states = getattr(caller, "_per_optimizer_states", {})
    return id(optimizer) in states and states[id(optimizer)]["stage"] is OptState.UNSCALED


class GradientOptimizer(torch.optim.Optimizer):
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer."""

    def _distribute(self, names: Names, passes: int, options: Options) -> None:
        self._given_names = names
        self._passes = passes
        self._options = options
        self._parameters: list[torch.Tensor] = []
        self._names: Names = {}
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._buckets: dict[torch.Tensor, Bucket] = {}
        self._compressors: dict[torch.Tensor, GradientCompressor] = {}
        self._is_sole_owner = False
        self._reset()
        self._adopt()
        _ordinals.add(self)

    def _reset(self) -> None:
        self._reductions: dict[Bucket, Reduction] = {}
        self._skip = False
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before the first gradient."""
        self._countdown: dict[torch.Tensor, int] = {}
        self._states: dict[torch.Tensor, tuple[int, int]] = {}
        self._synchronized = False
        self._combined_for_scaler = False

    def _adopt(self) -> None:
        """Take in the parameters that were added, removed, or made trainable since the last call."""
        if not self._options.process_set.included():
            return
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if len(parameters) != len(self._parameters) or not all(map(is_, parameters, self._parameters)):
            self._arrange(parameters)
        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = _hook(parameter, self._on_gradient)

    def _arrange(self, parameters: list[torch.Tensor]) -> None:
        if not self._is_under_way():  # otherwise ranks at different points would send different buckets
            self._parameters = parameters
            self._remove_all_but(set(parameters))
        added = [parameter for parameter in parameters if parameter not in self._buckets]
        self._names = complete_names(parameter_groups(self), self._given_names | self._names)
        for parameter in added:
            if parameter not in self._compressors:
                self._compressors[parameter] = compressor_for(self._options.compression, parameter)
        for members in plan(added, self._options.groups, size_of):
            bucket = Bucket(members)
            self._buckets.update(dict.fromkeys(bucket.parameters, bucket))
            listed = ", ".join(self._names[parameter] for parameter in members)
            logger.info("%s holds the gradients of: %s", label(members, self._names), listed)

    def _remove_all_but(self, kept: set[torch.Tensor]) -> None:
        """If parameters are gone, name the others and put them into buckets again, as on a rank that starts now."""
        gone = [parameter for parameter in self._buckets if parameter not in kept]
        if gone:
            self._buckets.clear()
            self._names.clear()
        for parameter in gone:
            del self._compressors[parameter]
            if parameter in self._hooks:
                self._hooks.pop(parameter).remove()

    def _is_under_way(self) -> bool:
        """Whether there are gradients, complete or in flight, that no step has used."""
        return bool(self._reductions or self._countdown)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in the wrapped optimizer; the new gradients are combined, too. All ranks add the same groups."""
        super().add_param_group(param_group)
        self._adopt()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Runs in backward, when the gradient of ``parameter`` is complete for this pass."""
        self._synchronized = self._combined_for_scaler = False
        if size() == 1:
            return
        if not self._is_under_way():
            self._adopt()
        bucket = self._buckets.get(parameter)
        if bucket is None:  # removed
            return
        left = self._passes_before(parameter) - 1
        self._states[parameter] = _state(parameter)
        if bucket in self._reductions or left < 0:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self._passes} times before step(); raise it, or {SEND_REMEDY}"
            )
        self._countdown[parameter] = left
        if left == 0 and not engine().patient and self._is_ready(bucket):
            self._send_early(bucket)

    def _passes_before(self, parameter: torch.Tensor) -> int:
        """The number of passes that were missing before this one; all of them if the earlier gradient was replaced."""
        gradient, version = self._states.get(parameter, (0, 0))
        has_grown = _state(parameter) == (gradient, version + 1)
        return self._countdown.get(parameter, self._passes) if has_grown else self._passes

    def _send_early(self, bucket: Bucket) -> None:
        try:
            self._send(bucket)
        except Exception:  # the step can be repeated
            for parameter in bucket.parameters:
                self._countdown.pop(parameter, None)
            raise
        self._states.update({each: _state(each) for each in bucket.parameters if each in self._states})

    def _is_ready(self, bucket: Bucket) -> bool:
        """The check starts with the parameter that backward is likely to reach last, so it usually ends at once."""
        return all(self._countdown.get(each) == 0 for each in reversed(bucket.parameters) if each.requires_grad)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Combine the gradients of parameters that are trained, or were until backward; a missing gradient is zeros."""
        members = [each for each in bucket.parameters if each.requires_grad or each in self._countdown]
        if members:
            prefix = self._prefix()
            self._reductions[bucket] = Reduction(bucket, members, self._names, prefix, self._compressors, self._options)

    def _prefix(self) -> str:
        """The prefix of names in flight; other optimizers with the same parameter names have other prefixes."""
        if not self._is_sole_owner:
            _ordinals.collect_garbage()
            self._require_sole_owner()
            self._is_sole_owner = True
        ordinal = _ordinals.get(self)
        return f"optimizer{ordinal}." if ordinal else ""

    @property
    def _parameter_names(self) -> Names:
        """The name of each parameter, as scripts read it from Horovod's optimizers."""
        return complete_names(parameter_groups(self), self._given_names | self._names)

    def take_ordinal(self) -> None:
        """Count this optimizer among those that all ranks have made."""
        _ordinals.get(self)

    def names_in_flight(self) -> set[str]:
        """The names of its parameters; see :class:`hvd_cluster.optimizer.ordinals.Numbered`."""
        return {self._names[parameter] for parameter in self._buckets}

    def process_set_in_flight(self) -> ProcessSet:
        """The ranks that combine its gradients."""
        return self._options.process_set

    def _require_sole_owner(self) -> None:
        for other in _ordinals.all():
            shared = [self._names[each] for each in self._buckets if other is not self and each in other._buckets]
            if shared:
                raise InvalidRequestError(
                    f"the parameter {shared[0]!r} is in two DistributedOptimizers, which would both combine its "
                    "gradient; put each parameter into one of them, or delete one of them"
                )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        check_passes(passes)
        self._passes = passes
        self._countdown = {parameter: left for parameter, left in self._countdown.items() if left == 0}

    @torch.no_grad()
    def synchronize(self) -> None:
        """Wait until all gradients are combined; those that backward did not reach count as zeros.

        Does nothing on ranks outside of the process set, and in a world of one. Raises MismatchError, on all ranks,
        when the ranks have gradients of different kinds or sizes, HorovodInternalError when a rank is lost,
        InvalidRequestError when gradients were changed after they had been sent.
        """
        if size() > 1:
            self._combine()
        self._synchronized = True

    def _combine(self) -> None:
        self._adopt()
        changed = self._changed()
        lost = [parameter for parameter in changed if self._buckets.get(parameter) in self._reductions]
        try:
            for bucket in dict.fromkeys(self._buckets.values()):
                if bucket not in self._reductions:
                    self._send(bucket)
            self._finish()
        finally:
            self._reductions.clear()
            self._forget()
        if lost:
            raise InvalidRequestError(
                f"the gradient of {self._names[lost[0]]!r} was changed when it was on its way already, which is lost; "
                f"{CHANGE_REMEDY}"
            )
        if changed:
            warnings.warn(
                f"the gradient of {self._names[changed[0]]!r} was changed between backward and step(). That counts "
                "where gradients travel in step(), as here, but is an error where there is a core for them to travel "
                f"during backward; {CHANGE_REMEDY}",
                stacklevel=2,
            )

    def _changed(self) -> list[torch.Tensor]:
        """Parameters with gradients that were changed after they were complete, or after they were sent."""
        states, countdown = self._states, self._countdown
        return [each for each in states if countdown.get(each) == 0 and _state(each) != states[each]]

    def _finish(self) -> None:
        """Raises the first error, but only once nothing is in flight, so that the step can be repeated."""
        waiting = list(self._reductions.values())
        errors: list[HorovodInternalError] = []
        while waiting:
            going = []
            for reduction in waiting:
                try:
                    if not reduction.advance():
                        going.append(reduction)
                except HorovodInternalError as error:
                    errors.append(error)
                    reduction.abandon()
            waiting = going
        if errors:
            raise errors[0]

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
        if closure is not None:
            return super().step(lambda: self._evaluate(closure))
        if not (self._skip or self._combined_for_scaler):
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are combined twice, which costs time and, with op=Sum, "
                    "adds them up again. Call step() inside optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = self._combined_for_scaler = False
        return super().step()

    # Otherwise Optimizer.__setstate__ would put its hooks around this step as well as around the class's own step.
    step.hooked = True  # type: ignore[attr-defined]

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._synchronized = False
        with torch.enable_grad():
            loss = closure()
        if not (self._skip or self._synchronized):
            self.synchronize()
        self._synchronized = False
        return self._joint(loss) if isinstance(self, torch.optim.LBFGS) else loss

    def _joint(self, loss: Any) -> torch.Tensor:
        """LBFGS decides by the loss, and all ranks must decide alike."""
        options = self._options
        here = torch.as_tensor(loss).detach()
        if not options.process_set.included():
            return here
        return allreduce(here, name="loss.LBFGS", op=options.op, process_set=options.process_set)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it looks for infinities; all ranks must see the same ones."""
        if not (self._skip or self._is_combined()):
            self.synchronize()
            self._synchronized = False
            self._require_scaled(sys._getframe(1).f_locals.get("self"))
            self._synchronized = self._combined_for_scaler = True
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def _is_combined(self) -> bool:
        """Whether every trained parameter has a combined gradient; if one has none, other ranks would wait."""
        return self._synchronized and all(each.grad is not None for each in self._parameters if each.requires_grad)

    def _require_scaled(self, caller: Any) -> None:
        """InvalidRequestError if each rank has looked for infinities in its own gradients: some would not step."""
        if self._buckets and size() > 1 and _has_unscaled(caller, self):
            raise InvalidRequestError(f"unscale_() was called before the gradients were combined; {CHANGE_REMEDY}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the wrapped optimizer; AssertionError while gradients are in flight. Other gradients are forgotten."""
        if self._reductions:
            raise AssertionError(f"zero_grad() was called while gradients are in flight; {SEND_REMEDY}")
        self._forget()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in the wrapped optimizer; earlier gradients and the state of compressors are forgotten."""
        for reduction in self._reductions.values():
            reduction.abandon()
        self._reset()
        self._compressors = {each: compressor_for(self._options.compression, each) for each in self._compressors}
        super().load_state_dict(state_dict)
