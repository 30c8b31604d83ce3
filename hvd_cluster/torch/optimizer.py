"""An optimizer whose gradients are combined over all ranks, while backward still runs where there is a core for it."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from collectives.api import InvalidRequestError, ReduceOp
from hvd_cluster.basics import engine
from hvd_cluster.operations import process_set_id
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.compression import Compression, Compressor, require_compressor
from hvd_cluster.torch.mpi_ops import Handle, allreduce_async_, synchronize

__all__ = ["DistributedOptimizer"]


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    *,
    process_set: ProcessSet = global_process_set,
) -> torch.optim.Optimizer:
    """Wrap ``optimizer``: its ``step()`` works on gradients combined over all ranks.

    The result is an instance of a subclass of the optimizer's own class, and shares groups, state and attributes with
    ``optimizer``, so that a scheduler made for the one drives the other. Each gradient is submitted when backward has
    finished it, under the name of its parameter, and travels while backward goes on; ``step()`` waits for all. Where
    the ranks leave no core for that, all are submitted by ``step()``. ``op`` is Average or Sum. With
    ``backward_passes_per_step`` n, gradients add up over n passes before they travel.
    InvalidRequestError for bad arguments, NotInitializedError before ``init()``.
    """
    process_set_id(process_set)
    _require_unwrapped(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    names = _names(parameters, named_parameters)
    _check_passes(backward_passes_per_step)
    require_compressor(compression)
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise InvalidRequestError(f"op={op!r} cannot combine gradients; use Average or Sum")
    base = type(optimizer)
    wrapped_class = type(base.__name__, (_DistributedMixin, base), {"__module__": base.__module__})
    wrapped: Any = object.__new__(wrapped_class)
    wrapped.__dict__ = optimizer.__dict__
    wrapped._wrapper = weakref.ref(wrapped)
    if "step" in wrapped.__dict__:
        wrapped.step = _followed(wrapped)
    wrapped._distribute(names, compression, backward_passes_per_step, op, process_set)
    result: torch.optim.Optimizer = wrapped
    return result


def _require_unwrapped(optimizer: Any) -> None:
    """Refuse what is wrapped already; forget a wrapper that is gone."""
    wrapper = getattr(optimizer, "_wrapper", None)
    if not isinstance(optimizer, torch.optim.Optimizer) or (wrapper is not None and wrapper() is not None):
        raise InvalidRequestError(f"cannot wrap a {type(optimizer)}; give a torch optimizer that is not wrapped yet")
    for handle in getattr(optimizer, "_hooks", {}).values():
        handle.remove()


def _followed(wrapped: Any) -> Callable[..., Any]:
    """What a scheduler put in the place of ``step``, to see that it is called, for the wrapped optimizer."""

    def step(*args: Any, **kwargs: Any) -> Any:
        wrapped._opt_called = True
        return type(wrapped).step(wrapped, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return step


def _names(
    parameters: list[torch.Tensor], named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {parameter: f"noname.{number}" for number, parameter in enumerate(parameters)}
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    wrong = [type(entry).__name__ for entry in named if not isinstance(entry, tuple) or len(entry) != 2]
    if wrong:
        raise InvalidRequestError(
            f"named_parameters must be (name, parameter) pairs, as model.named_parameters() gives, not {wrong[0]}"
        )
    names = [name for name, _ in named]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidRequestError(f"named_parameters uses the names {repeated} more than once; each must be unique")
    result: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
    unnamed = sum(parameter not in result for parameter in parameters)
    if unnamed:
        raise InvalidRequestError(
            f"{unnamed} parameters of the optimizer are not in named_parameters; name all or none"
        )
    return result


def _check_passes(passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InvalidRequestError(f"backward_passes_per_step={passes!r} must be an integer of at least 1")


def _hook(parameter: torch.Tensor, on_gradient: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """Call the method ``on_gradient``, as long as its object is in use, when a gradient is complete."""
    method = weakref.WeakMethod(on_gradient)

    def hook(parameter: torch.Tensor) -> None:
        on_gradient = method()
        if on_gradient is None:
            handle.remove()
        else:
            on_gradient(parameter)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _sharers(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


_ALONE = _sharers(torch.empty(1))


def _is_shared(gradient: torch.Tensor) -> bool:
    """Whether others use the memory: autograd hands a gradient over as it is, even to two parameters."""
    return gradient.layout is torch.strided and _sharers(gradient) > _ALONE


class _DistributedMixin(torch.optim.Optimizer):
    """What a wrapped optimizer's class has before its own."""

    def _distribute(
        self,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes: int,
        op: ReduceOp,
        process_set: ProcessSet,
    ) -> None:
        self._names = names
        self._compression = compression
        self._passes = passes
        self._op = op
        self._process_set = process_set
        self._handles: dict[torch.Tensor, tuple[Handle, Any]] = {}
        self._countdown: dict[torch.Tensor, int] = {}
        self._synchronized = False
        self._skip = False
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._adopt()

    def _adopt(self) -> None:
        """Follow the parameters that were added, or made trainable, since the last time."""
        if self._process_set.included():
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                if parameter.requires_grad and parameter not in self._hooks:
                    self._names.setdefault(parameter, f"noname.{len(self._names)}")
                    self._hooks[parameter] = _hook(parameter, self._on_gradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; the new gradients are combined, too. All ranks add the same groups."""
        super().add_param_group(param_group)
        self._adopt()

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Runs in backward, when the gradient of ``parameter`` is complete for this pass."""
        left = self._countdown.get(parameter, self._passes) - 1
        if parameter in self._handles or left < 0:
            raise AssertionError(
                f"the gradient of {self._names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self._passes} times before step(); call step() or synchronize() more often, or raise it"
            )
        if left == 0 and not engine().patient:
            self._submit(parameter)
        self._countdown[parameter] = left
        self._synchronized = False

    def _submit(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        elif _is_shared(parameter.grad):
            parameter.grad = parameter.grad.clone()
        small, context = self._compression.compress(parameter.grad)
        name = f"gradient.{self._names[parameter]}"
        handle = allreduce_async_(small, name=name, op=self._op, process_set=self._process_set)
        self._handles[parameter] = (handle, context)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        _check_passes(passes)
        self._passes = passes
        self._countdown = {parameter: left for parameter, left in self._countdown.items() if left == 0}

    def synchronize(self) -> None:
        """Wait until all gradients are combined; those that backward did not reach count as zeros.

        Raises HorovodInternalError when a rank is lost.
        """
        self._adopt()
        try:
            for parameter in self._hooks:
                if (parameter.requires_grad or parameter in self._countdown) and parameter not in self._handles:
                    self._submit(parameter)
            for parameter, (handle, context) in self._handles.items():
                self._store(parameter, self._compression.decompress(synchronize(handle), context))
        finally:
            self._handles.clear()
            self._countdown.clear()
        self._synchronized = True

    def _store(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
            parameter.grad.copy_(gradient)

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
        if not self._skip:
            if self._synchronized:
                warnings.warn(
                    "step() combines gradients that synchronize() has combined already; call step() inside "
                    "optimizer.skip_synchronize()",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self._synchronized = False
        with torch.enable_grad():
            loss = closure()
        if not (self._skip or self._synchronized):
            self.synchronize()
        self._synchronized = False
        return loss

    # Or Optimizer.__setstate__ would put its hooks around this step, in addition to those around the class's own.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's; AssertionError while gradients are in flight."""
        if self._handles or 0 in self._countdown.values():
            raise AssertionError(
                "zero_grad() was called while gradients are in flight; call step() or synchronize() first"
            )
        super().zero_grad(set_to_none)
