"""The optimizer that combines the changes of the ranks' steps, with Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectives.api import ReduceOp
from hvd_cluster.basics import size
from hvd_cluster.compression import decompress_all
from hvd_cluster.optimizer.names import complete_names
from hvd_cluster.optimizer.options import Options, check_passes
from hvd_cluster.torch.mpi_ops import allreduce, allreduce_async_
from hvd_cluster.torch.operations.operands import synchronize_all
from hvd_cluster.torch.optimizer.parameters import Names, parameter_groups

__all__ = ["AdasumOptimizer"]


class AdasumOptimizer(torch.optim.Optimizer):
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer.

    Each rank steps by its own gradients, with its own state. Then the Adasum of the differences of all ranks replaces
    the difference that the step made to a parameter. Source: see :mod:`collectives.backends.adasum`, section 4.3:
    Adasum of differences works with any optimizer.
    """

    def _distribute(self, names: Names, passes: int, options: Options) -> None:
        self._given_names = names
        self._passes = passes
        self._options = options

    @property
    def _parameter_names(self) -> Names:
        """The name of each parameter, as scripts read it from Horovod's optimizers."""
        return complete_names(parameter_groups(self), self._given_names)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank, and combine the changes. Gradients stay those of this rank."""
        if not self._has_company():
            return super().step(closure)
        before = {parameter: parameter.detach().clone() for parameter in self._trained()}
        result = super().step(closure)
        self._combine(before)
        return result

    # Otherwise Optimizer.__setstate__ would put its hooks around this step as well as around the class's own step.
    step.hooked = True  # type: ignore[attr-defined]

    def _has_company(self) -> bool:
        return size() > 1 and bool(self._options.process_set.included())

    def _trained(self) -> Iterator[torch.Tensor]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or parameter.grad is not None:
                    yield parameter

    @torch.no_grad()
    def _combine(self, before: dict[torch.Tensor, torch.Tensor]) -> None:
        options, names = self._options, self._parameter_names
        handles, contexts = [], []
        for parameter, start in before.items():
            small, context = options.compression.compress(parameter - start)
            name = f"delta.{names[parameter]}"
            handles.append(allreduce_async_(small, name=name, op=ReduceOp.ADASUM, process_set=options.process_set))
            contexts.append(context)
        changes = decompress_all(options.compression, synchronize_all(handles), contexts)
        for (parameter, start), change in zip(before.items(), changes, strict=True):
            parameter.copy_(start.add_(change))

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it looks for infinities; all ranks must step, or none."""
        gradients = [parameter.grad for parameter in self._trained() if parameter.grad is not None]
        if gradients and self._has_company():
            self._share_infinities(gradients)
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    @torch.no_grad()
    def _share_infinities(self, gradients: list[torch.Tensor]) -> None:
        values = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
        broken = torch.tensor(not all(bool(each.isfinite().all()) for each in values), dtype=torch.uint8)
        if allreduce(broken, name="infinities", op=ReduceOp.MAX, process_set=self._options.process_set).item():
            gradients[0].mul_(torch.inf)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up in ``.grad`` until ``step()``, for any number of passes."""
        check_passes(passes)
        self._passes = passes

    def synchronize(self) -> None:
        """Does nothing: gradients are not combined."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """AssertionError, unless this rank is alone: there is nothing to skip."""
        if size() > 1:
            raise AssertionError(
                "with op=Adasum, step() does not combine gradients; call step() without skip_synchronize()"
            )
        yield
