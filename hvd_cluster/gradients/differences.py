"""Adasum of differences: each rank steps by its own gradients, and the ranks combine the changes that it made.

Source: see :mod:`collectives.backends.adasum`, section 4.3: Adasum of differences works with any optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import numpy as np

from collectives.api import InvalidRequestError, MismatchError, Operation, ReduceOp
from hvd_cluster.comparison.meeting import agreed_names
from hvd_cluster.core import basics
from hvd_cluster.gradients.binding import DifferenceBinding
from hvd_cluster.gradients.buckets import label
from hvd_cluster.gradients.compression import compressed, decompress_all
from hvd_cluster.gradients.inventory import complete_names, is_same_list, model_of
from hvd_cluster.gradients.options import Options, check_passes
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.operands import run
from hvd_cluster.ops.refusals import refuse

P = TypeVar("P")
T = TypeVar("T")
Tensor: TypeAlias = Any
"""A tensor of the framework."""


class _Common(NamedTuple):
    """The names of ``parameters`` on which the ranks of ``world`` agree."""

    world: Callable[[], object | None]
    parameters: Sequence[Any]
    names: Mapping[Any, str]


class DifferenceCombiner(Generic[P]):
    """Replaces the change that each step makes to a parameter by the Adasum of the changes of all ranks.

    ``groups`` gives the parameters of the optimizer, ``given_names`` are those that the user gave.
    """

    def __init__(
        self,
        binding: DifferenceBinding[P],
        groups: Callable[[], Sequence[Sequence[P]]],
        given_names: Mapping[P, str],
        passes: int,
        options: Options,
    ) -> None:
        self.given_names = dict(given_names)
        self.passes = passes
        self.options = options
        self._binding = binding
        self._groups = groups
        self._common = _Common(lambda: None, [], {})

    @property
    def all_names(self) -> dict[P, str]:
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
        binding = self._binding
        before = {parameter: binding.snapshot(parameter) for parameter in self._trained()}
        result = step()
        with binding.unrecorded():
            try:
                changes = self._combined(before) if before else []
            except BaseException:
                for parameter, start in before.items():
                    binding.restore(parameter, start)
                raise
            for (parameter, start), change in zip(before.items(), changes, strict=True):
                binding.move(parameter, start, change)
        return result

    def _common_names(self) -> Mapping[P, str]:
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

    def _parameters(self) -> list[P]:
        return list(chain.from_iterable(self._groups()))

    def _trained(self) -> list[P]:
        binding = self._binding
        return [each for each in self._parameters() if binding.is_trained(each) or binding.gradient(each) is not None]

    def _combined(self, before: Mapping[P, Tensor]) -> Sequence[Tensor]:
        """The combined changes; all travel as one group, so that ranks with other parameters are an error."""
        name, options = label(self._parameters(), self._common_names(), "delta"), self.options
        small, contexts = self._compressed(before, name)
        try:
            handle = self._binding.start_group(small, name, options.process_set, {"op": ReduceOp.ADASUM})
            combined = self._binding.wait(handle)
        except InvalidRequestError as error:
            refuse(error, Operation.ALLREDUCE, name, options.process_set, len(before))
            raise
        except MismatchError as error:
            self._explain(error, name, before)
        return decompress_all(options.compression, combined, contexts)

    def _explain(self, error: MismatchError, name: str, before: Mapping[P, Tensor]) -> NoReturn:
        names = self.all_names
        text = f"{error}. The parameters in {name!r}: {', '.join(names[parameter] for parameter in before)}"
        raise type(error)(text, error.tensor, error.property, error.values) from error

    def _compressed(self, before: Mapping[P, Tensor], group: str) -> tuple[list[Tensor], list[Any]]:
        small, contexts = [], []
        for parameter, start in before.items():
            try:
                tensor, context = compressed(self.options.compression, self._binding.difference(parameter, start))
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
        binding = self._binding
        found = [binding.gradient(parameter) for parameter in self._trained()]
        gradients = [gradient for gradient in found if gradient is not None]
        if not gradients or not self.has_company:
            return
        broken = np.array(not all(binding.is_finite(gradient) for gradient in gradients), np.uint8)
        run(Operation.ALLREDUCE, in_place, broken, "infinities", self.options.process_set, op=ReduceOp.MAX)
        if broken.item():
            binding.spoil(gradients[0])
