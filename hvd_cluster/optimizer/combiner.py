"""The course of a training step: counts gradients, sends buckets that are complete, and waits for all."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Generic, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError, MismatchError
from hvd_cluster import basics
from hvd_cluster.compression import GradientCompressor, compressor_for
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.buckets import label, plan
from hvd_cluster.optimizer.names import complete_names
from hvd_cluster.optimizer.options import Options, check_passes
from hvd_cluster.optimizer.reduction import Bucket, Reduction, Setup
from hvd_cluster.optimizer.rivals import Member, rivals

__all__ = ["GradientCombiner"]

logger = logging.getLogger(__name__)

P = TypeVar("P")


class GradientCombiner(Generic[P]):
    """Combines the gradients of the parameters of one optimizer over all ranks.

    ``optimizer`` is in use as long as this object has to combine anything; neither ``groups``, which gives its
    parameters, nor ``binding`` may keep it alive, because an optimizer that was replaced must not send gradients.
    ``names`` are those that the user gave. After ``passes`` backward passes a gradient is complete.
    """

    def __init__(
        self,
        optimizer: object,
        binding: Binding[P],
        groups: Callable[[], Sequence[Sequence[P]]],
        names: Mapping[P, str],
        passes: int,
        options: Options,
    ) -> None:
        self.options = options
        self.passes = passes
        self.given_names = dict(names)
        self.names: dict[P, str] = {}
        self.parameters: list[P] = []
        self.buckets: dict[P, Bucket[P]] = {}
        self._binding = binding
        self._groups = groups
        self._watches: dict[P, Callable[[], None]] = {}
        self._compressors: dict[P, GradientCompressor] = {}
        self._is_sole_owner = False
        member = Member(options.process_set, self._names_in_use, lambda: self.buckets, lambda: self.is_under_way)
        self.claim = rivals.add(optimizer, member)
        self._setup = Setup(binding, self.names, self._compressors, options, self.claim)
        self._reductions: dict[Bucket[P], Reduction[P]] = {}
        self._countdown: dict[P, int] = {}
        self._states: dict[P, tuple[int, int]] = {}
        self.adopt()

    def _names_in_use(self) -> set[str]:
        return {self.names[parameter] for parameter in self.buckets}

    def release(self) -> None:
        """Watch no gradient any more: another object is to combine them."""
        for end in self._watches.values():
            end()
        self._watches.clear()

    # Parameters.

    @property
    def all_names(self) -> dict[P, str]:
        """The name of each parameter of the optimizer."""
        return complete_names(self._groups(), self.given_names | self.names)

    def adopt(self) -> None:
        """Take in the parameters that were added, removed, or made trainable since the last call."""
        if not self.options.process_set.included():
            return
        parameters = list(chain.from_iterable(self._groups()))
        if len(parameters) != len(self.parameters) or not all(map(is_, parameters, self.parameters)):
            self._arrange(parameters)
        watches, is_trained = self._watches, self._binding.is_trained
        for parameter in parameters:
            if parameter not in watches and is_trained(parameter):
                watches[parameter] = self._binding.watch(parameter)

    def _arrange(self, parameters: list[P]) -> None:
        if not self.is_under_way:  # otherwise ranks at different points would send different buckets
            self.parameters = parameters
            self._remove_all_but(set(parameters))
        added = [parameter for parameter in parameters if parameter not in self.buckets]
        self.names.update(self.all_names)
        for parameter in added:
            if parameter not in self._compressors:
                self._compressors[parameter] = compressor_for(self.options.compression, parameter)
        for members in plan(added, self.options.groups, self._binding.size):
            bucket = Bucket(members)
            self.buckets.update(dict.fromkeys(bucket.parameters, bucket))
            listed = ", ".join(self.names[parameter] for parameter in members)
            logger.info("%s holds the gradients of: %s", label(members, self.names), listed)

    def _remove_all_but(self, kept: set[P]) -> None:
        """If parameters are gone, name the others and put them into buckets again, as on a rank that starts now."""
        gone = [parameter for parameter in self.buckets if parameter not in kept]
        if gone:
            self.buckets.clear()
            self.names.clear()
        for parameter in gone:
            del self._compressors[parameter]
            if parameter in self._watches:
                self._watches.pop(parameter)()

    # Backward.

    @property
    def is_under_way(self) -> bool:
        """Whether there are gradients, complete or in flight, that no step has used."""
        return bool(self._reductions or self._countdown)

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are in flight."""
        return bool(self._reductions)

    def on_gradient(self, parameter: P) -> None:
        """The gradient of ``parameter`` is complete for this pass; it is sent if its bucket is complete.

        AssertionError for more passes than agreed.
        """
        if basics.size() == 1:
            return
        if not (self._reductions or self._countdown):
            self.adopt()
        bucket = self.buckets.get(parameter)
        if bucket is None:  # removed
            return
        state = self._binding.state(parameter)
        left = self._passes_before(parameter, state) - 1
        self._states[parameter] = state
        if bucket in self._reductions or left < 0:
            raise AssertionError(
                f"the gradient of {self.names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(). Raise backward_passes_per_step, or {self._binding.send_remedy}"
            )
        self._countdown[parameter] = left
        if left == 0 and not basics.engine().patient and self._may_travel(bucket):
            self._send_early(bucket)

    def _passes_before(self, parameter: P, state: tuple[int, int]) -> int:
        """The number of passes that were missing before this one; all of them if the earlier gradient was replaced."""
        gradient, version = self._states.get(parameter, (0, 0))
        has_grown = state == (gradient, version + 1)
        return self._countdown.get(parameter, self.passes) if has_grown else self.passes

    def _may_travel(self, bucket: Bucket[P]) -> bool:
        """Whether ``bucket`` is complete, and its names are certain to be those of the other ranks.

        The lead buckets of rivals have the same names, so each travels in the step of its optimizer.
        """
        return (
            self.claim.is_agreed and self._is_ready(bucket) and not (self.claim.has_rivals and bucket is self._lead())
        )

    def _is_ready(self, bucket: Bucket[P]) -> bool:
        """The check starts with the parameter that backward is likely to reach last, so it usually ends at once."""
        countdown, is_trained = self._countdown, self._binding.is_trained
        return all(countdown.get(each) == 0 for each in reversed(bucket.parameters) if is_trained(each))

    def _send_early(self, bucket: Bucket[P]) -> None:
        try:
            self._send(bucket)
        except Exception:  # the step can be repeated
            for parameter in bucket.parameters:
                self._countdown.pop(parameter, None)
            raise
        state = self._binding.state
        self._states.update({each: state(each) for each in bucket.parameters if each in self._states})

    def _send(self, bucket: Bucket[P]) -> None:
        """Combine the gradients of parameters that are trained, or were until backward; a missing gradient is zeros."""
        is_trained, countdown = self._binding.is_trained, self._countdown
        members = [each for each in bucket.parameters if is_trained(each) or each in countdown]
        if members:
            self._require_sole_owner()
            with self._binding.unrecorded():
                self._reductions[bucket] = Reduction(bucket, members, self._setup, bucket is self._lead())

    def _lead(self) -> Bucket[P] | None:
        """The bucket of the first parameter that is trained: backward completes it last."""
        is_trained, countdown = self._binding.is_trained, self._countdown
        first = next((each for each in self.parameters if is_trained(each) or each in countdown), None)
        return None if first is None else self.buckets[first]

    def _require_sole_owner(self) -> None:
        if self._is_sole_owner:
            return
        rivals.collect_garbage()
        for other in rivals.all():
            theirs = other.member.parameters()
            shared = [self.names[each] for each in self.buckets if other is not self.claim and each in theirs]
            if shared:
                raise InvalidRequestError(
                    f"the parameter {shared[0]!r} is in two DistributedOptimizers, which would both combine its "
                    "gradient; put each parameter into one of them, or delete one of them"
                )
        self.claim.propose()
        self._is_sole_owner = True

    # The step.

    def combine(self) -> None:
        """Wait until all gradients are combined; those that backward did not reach count as zeros.

        Raises MismatchError, on all ranks, when the ranks have gradients of different kinds or sizes,
        HorovodInternalError when a rank is lost, InvalidRequestError when gradients were changed after they were sent.
        """
        self.adopt()
        changed = self._changed()
        lost = [parameter for parameter in changed if self.buckets.get(parameter) in self._reductions]
        try:
            self._combine()
        finally:
            self._reductions.clear()
            self.forget()
        if lost:
            raise InvalidRequestError(
                f"the gradient of {self.names[lost[0]]!r} was changed while it was in flight, and the change is lost; "
                f"{self._binding.change_remedy}"
            )
        if changed:
            warnings.warn(
                f"the gradient of {self.names[changed[0]]!r} was changed between backward and step(). The change "
                "counts here, because gradients travel in step(). With a spare core they travel during backward, and "
                f"the change is an error; {self._binding.change_remedy}",
                stacklevel=3,
            )

    def _combine(self) -> None:
        errors = self._agree_on_number()
        failed = self._lead() if errors else None
        if not errors or isinstance(errors[0], MismatchError):  # the others may have sent the rest already
            for bucket in dict.fromkeys(self.buckets.values()):
                if bucket not in self._reductions and bucket is not failed:
                    self._send(bucket)
        errors += self._finish()
        if errors:
            raise errors[0]

    def _agree_on_number(self) -> list[HorovodInternalError]:
        """The lead bucket goes ahead alone until the ranks agree on a number, and so on the other names."""
        lead = None if self.claim.is_agreed else self._lead()
        if lead is None:
            return []
        self._send(lead)
        try:
            is_complete = False  # a compressor may send nothing at all
            while not (self.claim.is_agreed or is_complete):
                is_complete = self._reductions[lead].advance()
        except HorovodInternalError as error:
            self._reductions.pop(lead).abandon()
            return [error]
        return []

    def _changed(self) -> list[P]:
        """Parameters with gradients that were changed after they were complete, or after they were sent."""
        states, countdown, state = self._states, self._countdown, self._binding.state
        return [each for each in states if countdown.get(each) == 0 and state(each) != states[each]]

    def _finish(self) -> list[HorovodInternalError]:
        """The errors of the reductions, when nothing is in flight any more, so that the step can be repeated.

        The lead bucket comes first: a rank that must agree on the number has not sent the others.
        """
        waiting = sorted(self._reductions.values(), key=lambda reduction: not reduction.leads)
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
        return errors

    # The state between steps.

    def set_passes(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        check_passes(passes)
        self.passes = passes
        self._countdown = {parameter: left for parameter, left in self._countdown.items() if left == 0}

    def forget(self, caller: str = "forget") -> None:
        """Reset to the state before the first gradient. AssertionError, with the ``caller``, if some are in flight."""
        if self._reductions:
            raise AssertionError(f"{caller}() was called while gradients are in flight; {self._binding.send_remedy}")
        self._countdown, self._states = {}, {}

    def restart(self) -> None:
        """Forget gradients, in flight or not, and the state of compressors."""
        for reduction in self._reductions.values():
            reduction.abandon()
        self._reductions.clear()
        self.forget()
        for parameter in self._compressors:
            self._compressors[parameter] = compressor_for(self.options.compression, parameter)

    def has_all_gradients(self) -> bool:
        """Whether every trained parameter has a gradient."""
        binding = self._binding
        return all(binding.gradient(each) is not None for each in self.parameters if binding.is_trained(each))
