"""The optimizer that combines the changes of the ranks' steps, with Adasum: each rank steps by its own gradients.

Source: see :mod:`collectives.backends.adasum`, section 4.3: Adasum of differences works with any optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch

from collectives import InvalidRequestError, MismatchError, Operation, ReduceOp, process_meter
from hvd_cluster.comparison.meeting import agreed_names
from hvd_cluster.core import basics
from hvd_cluster.gradients.buckets import label
from hvd_cluster.gradients.compression import compressed, decompress_all
from hvd_cluster.gradients.options import Options, check_passes
from hvd_cluster.ops import arrays
from hvd_cluster.ops.arguments import Reduction
from hvd_cluster.ops.refused_calls import refuse
from hvd_cluster.ops.submission import run
from hvd_cluster.torch.operations.calls import start_group, synchronize
from hvd_cluster.torch.optimizer.inventory import Names, complete_names, groups_of, model_of
from hvd_cluster.torch.optimizer.transfers import is_same_list
from hvd_cluster.torch.tensors import in_place

T = TypeVar("T")


class _Common(NamedTuple):
    """The names of ``parameters`` on which the ranks of ``world`` agree."""

    world: Callable[[], object | None]
    parameters: Sequence[torch.Tensor]
    names: Mapping[torch.Tensor, str]


class DifferenceCombiner:
    """Replaces the change that each step makes to a parameter by the Adasum of the changes of all ranks.

    ``groups`` gives the parameters of the optimizer, ``given_names`` are those that the user gave.
    """

    def __init__(
        self,
        groups: Callable[[], Sequence[Sequence[torch.Tensor]]],
        given_names: Mapping[torch.Tensor, str],
        passes: int,
        options: Options,
    ) -> None:
        self.given_names = dict(given_names)
        self.passes = passes
        self.options = options
        self._groups = groups
        self._common = _Common(lambda: None, [], {})

    @property
    def all_names(self) -> Names:
        """The name of each parameter of the optimizer."""
        return complete_names(self._groups(), self.given_names)

    def set_passes(self, passes: int) -> None:
        """Gradients add up until the step, for any number of passes; InvalidRequestError as for the argument."""
        check_passes(passes)
        self.passes = passes

    @property
    def has_company(self) -> bool:
        """Whether this rank combines anything with others."""
        return basics.size() > 1 and bool(self.options.process_set.included())

    def step(self, step: Callable[[], T]) -> T:
        """Call ``step``, which steps on this rank alone, and combine the changes of the parameters.

        The parameters are those that are trained, or have a gradient: the same ones on all ranks. Raises
        InvalidRequestError if the compressor fails, RefusedCallError if that of another rank does, and the errors of
        an allreduce; the parameters then have the values from before the step.
        """
        if not self.has_company:
            return step()
        before = {parameter: parameter.detach().clone() for parameter in self._trained()}
        result = step()
        with torch.no_grad():
            try:
                changes = self._combined(before) if before else []
            except BaseException:
                for parameter, start in before.items():
                    parameter.copy_(start)
                raise
            for (parameter, start), change in zip(before.items(), changes, strict=True):
                parameter.copy_(start.add_(change))
        return result

    def _common_names(self) -> Mapping[torch.Tensor, str]:
        """The names for all ranks, which compare their parameters the first time in a world."""
        parameters, common = self._parameters(), self._common
        if common.world() is not basics.engine() or not is_same_list(common.parameters, parameters):
            process_set = self.options.process_set
            model = model_of(parameters, self.all_names, self.options)
            agreed = agreed_names(model, lambda: [model], process_set)
            names = dict(zip(parameters, agreed.names, strict=True))
            common = _Common(weakref.ref(basics.engine()), parameters, names)
            if agreed.is_final:
                self._common = common
        return common.names

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._groups() for parameter in group]

    def _trained(self) -> list[torch.Tensor]:
        return [each for each in self._parameters() if each.requires_grad or each.grad is not None]

    def _combined(self, before: Mapping[torch.Tensor, torch.Tensor]) -> Sequence[torch.Tensor]:
        """The combined changes; all travel as one group, so that ranks with other parameters are an error."""
        name, options = label(self._parameters(), self._common_names(), "delta"), self.options
        small, contexts = self._compressed(before, name)
        try:
            adasum = Reduction(ReduceOp.ADASUM)
            handle = start_group(Operation.ALLREDUCE, in_place, small, tuple, name, options.process_set, adasum)
            combined = synchronize(handle)
        except InvalidRequestError as error:
            refuse(error, Operation.ALLREDUCE, name, options.process_set, len(before))
            raise
        except MismatchError as error:
            self._explain(error, name, before)
        return decompress_all(options.compression, combined, contexts)

    def _explain(self, error: MismatchError, name: str, before: Mapping[torch.Tensor, torch.Tensor]) -> NoReturn:
        names = self.all_names
        text = f"{error}. The parameters in {name!r}: {', '.join(names[parameter] for parameter in before)}"
        raise type(error)(text, error.tensor, error.property, error.values) from error

    def _compressed(
        self, before: Mapping[torch.Tensor, torch.Tensor], group: str
    ) -> tuple[list[torch.Tensor], list[Any]]:
        small, contexts = [], []
        for parameter, start in before.items():
            try:
                tensor, context = compressed(self.options.compression, parameter - start)
            except InvalidRequestError as error:
                self._refuse(error, self.all_names[parameter], group, len(before))
            small.append(tensor)
            contexts.append(context)
        return small, contexts

    def _refuse(self, cause: InvalidRequestError, name: str, group: str, length: int) -> NoReturn:
        """The other ranks, which send their changes, must not wait for this one."""
        error = InvalidRequestError(f"the change of {name!r}: {cause}")
        refuse(error, Operation.ALLREDUCE, group, self.options.process_set, length)
        raise error from cause.__cause__

    def share_infinities(self) -> None:
        """If a gradient of any rank is not finite, make one of this rank infinite: all ranks skip the step, or none.

        Does nothing on a rank without gradients.
        """
        found = [parameter.grad for parameter in self._trained()]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients or not self.has_company:
            return
        broken = np.array(not all(_is_finite(gradient) for gradient in gradients), np.uint8)
        most = Reduction(ReduceOp.MAX)
        run(Operation.ALLREDUCE, arrays.in_place, broken, "infinities", self.options.process_set, most)
        if broken.item():
            with torch.no_grad():
                gradients[0].mul_(torch.inf)


def _is_finite(gradient: torch.Tensor) -> bool:
    """Whether no element of ``gradient`` is infinite or NaN."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())


class AdasumOptimizer(torch.optim.Optimizer):
    """The first base of a wrapped optimizer's class; the second is the class of the optimizer."""

    _differences: DifferenceCombiner

    def _distribute(self, names: Names, passes: int, options: Options) -> None:
        self._differences = DifferenceCombiner(groups_of(self), names, passes, options)

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
        if basics.size() > 1:
            raise AssertionError(
                "with op=Adasum, step() does not combine gradients; call step() without skip_synchronize()"
            )
        yield
