"""The optimizer that combines the changes of the ranks' steps, with Adasum."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from collectives.observe.metrics.meter import process_meter
from hvd_cluster.core.basics import size
from hvd_cluster.gradients.differences import DifferenceCombiner
from hvd_cluster.gradients.options import Options
from hvd_cluster.torch.optimizer.binding import Names, TorchDifferences, groups_of


class AdasumOptimizer(torch.optim.Optimizer):
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer."""

    _differences: DifferenceCombiner[torch.Tensor]

    def _distribute(self, names: Names, passes: int, options: Options) -> None:
        self._differences = DifferenceCombiner(TorchDifferences(), groups_of(self), names, passes, options)

    @property
    def _parameter_names(self) -> Names:
        """The name of each parameter, as scripts read it from Horovod's optimizers."""
        return self._differences.all_names

    @property
    def _given_names(self) -> Names:
        return self._differences.given_names

    @property
    def _options(self) -> Options:
        return self._differences.options

    @property
    def _passes(self) -> int:
        return self._differences.passes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step on this rank, and combine the changes. Gradients stay those of this rank."""
        process_meter.count_step()
        alone = super().step
        return self._differences.step(lambda: alone(closure))

    # Otherwise Optimizer.__setstate__ would put its hooks around this step as well as around the class's own step.
    step.hooked = True  # type: ignore[attr-defined]

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler.step() reads this before it looks for infinities; all ranks must step, or none."""
        self._differences.share_infinities()
        return bool(self.__dict__.get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        self.__dict__["_step_supports_amp_scaling"] = value

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Gradients add up in ``.grad`` until ``step()``, for any number of passes."""
        self._differences.set_passes(passes)

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
