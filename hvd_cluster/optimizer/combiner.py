"""The course of a training step: counts gradients, sends buckets that are complete, and waits for all."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError, MismatchError, NotInitializedError
from collectives.engine.engine import Engine
from hvd_cluster import basics
from hvd_cluster.comparison.meeting import agreed_names
from hvd_cluster.optimizer.binding import Binding
from hvd_cluster.optimizer.bucket import Bucket, Setup
from hvd_cluster.optimizer.inventory import Inventory
from hvd_cluster.optimizer.options import Options, check_passes
from hvd_cluster.optimizer.progress import Progress
from hvd_cluster.optimizer.reduction import Reduction
from hvd_cluster.optimizer.rivals import Member, rivals

__all__ = ["GradientCombiner"]

P = TypeVar("P")
Failure: TypeAlias = HorovodInternalError | InvalidRequestError


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
        self.inventory = inventory = Inventory(binding, groups, names, options)
        self.buckets = inventory.buckets
        self._binding = binding
        self._is_sole_owner = False
        self._is_compared = False
        member = Member(
            options.process_set,
            inventory.names_in_use,
            lambda: inventory.buckets,
            lambda: self.is_under_way,
            inventory.model,
        )
        self.claim = rivals.add(optimizer, member)
        self._engine = weakref.ref(basics.engine())
        self.claim.enter(basics.engine())
        self._setup = Setup(binding, inventory.names, inventory.compressors, options, self.claim)
        self._reductions: dict[Bucket[P], Reduction[P]] = {}
        self._progress = Progress(binding, passes)
        self.adopt()

    @property
    def passes(self) -> int:
        """The number of backward passes after which a gradient is complete."""
        return self._progress.passes

    def adopt(self) -> None:
        """Take in the parameters that were added, removed, or made trainable since the last call."""
        self.inventory.adopt(self.is_under_way)

    def release(self) -> None:
        """Watch no gradient any more: another object is to combine them."""
        self.inventory.release()

    # Backward.

    @property
    def is_under_way(self) -> bool:
        """Whether there are gradients, complete or in flight, that no step has used."""
        return bool(self._reductions or self._progress.countdown)

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are in flight."""
        return bool(self._reductions)

    def on_gradient(self, parameter: P) -> None:
        """The gradient of ``parameter`` is complete for this pass; it is sent if its bucket is complete.

        AssertionError for more passes than agreed.
        """
        engine = basics.engine()
        if engine is not self._engine():
            self._begin_again(engine)
        if engine.topology.size == 1:
            return
        progress = self._progress
        if not (self._reductions or progress.countdown):
            self.adopt()
        bucket = self.buckets.get(parameter)
        if bucket is None:  # removed
            return
        left = progress.count(parameter)
        if bucket in self._reductions or left < 0:
            raise AssertionError(
                f"the gradient of {self._setup.names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(). Raise backward_passes_per_step, or {self._binding.send_remedy}"
            )
        progress.countdown[parameter] = left
        if left == 0 and not engine.patient and self._may_travel(bucket):
            self._send_early(bucket)

    def _may_travel(self, bucket: Bucket[P]) -> bool:
        """Whether ``bucket`` is complete, and its names are certain to be those of the other ranks.

        The lead buckets of rivals have the same names, so each travels in the step of its optimizer.
        """
        return (
            self.claim.is_agreed and self._is_ready(bucket) and not (self.claim.has_rivals and bucket is self._lead())
        )

    def _is_ready(self, bucket: Bucket[P]) -> bool:
        """The check starts with the parameter that backward is likely to reach last, so it usually ends at once."""
        countdown, is_trained = self._progress.countdown, self._binding.is_trained
        return all(countdown.get(each) == 0 for each in reversed(bucket.parameters) if is_trained(each))

    def _send_early(self, bucket: Bucket[P]) -> None:
        try:
            self._send(bucket)
        except Exception:  # the step can be repeated
            for parameter in bucket.parameters:
                self._progress.countdown.pop(parameter, None)
            raise
        states, state = self._progress.states, self._binding.state
        states.update({each: state(each) for each in bucket.parameters if each in states})

    def _send(self, bucket: Bucket[P]) -> None:
        """Combine the gradients of parameters that are trained, or were until backward; a missing gradient is zeros."""
        is_trained, countdown = self._binding.is_trained, self._progress.countdown
        members = [each for each in bucket.parameters if is_trained(each) or each in countdown]
        if members:
            self._require_sole_owner()
            with self._binding.unrecorded():
                self._reductions[bucket] = Reduction(bucket, members, self._setup, bucket is self._lead())

    def _lead(self) -> Bucket[P] | None:
        """The bucket of the first parameter that is trained: backward completes it last."""
        is_trained, countdown = self._binding.is_trained, self._progress.countdown
        first = next((each for each in self.inventory.parameters if is_trained(each) or each in countdown), None)
        return None if first is None else self.buckets[first]

    def _require_sole_owner(self) -> None:
        if self._is_sole_owner:
            return
        rivals.collect_garbage()
        for other in rivals.all():
            theirs = other.member.parameters()
            shared = [self._setup.names[each] for each in self.buckets if other is not self.claim and each in theirs]
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
        if basics.engine() is not self._engine():
            self._begin_again(basics.engine())
        self.adopt()
        changed, names = self._progress.changed(), self._setup.names
        lost = [parameter for parameter in changed if self.buckets.get(parameter) in self._reductions]
        try:
            self._combine()
        finally:
            self._reductions.clear()
            self.forget()
        if lost:
            raise InvalidRequestError(
                f"the gradient of {names[lost[0]]!r} was changed while it was in flight, and the change is lost; "
                f"{self._binding.change_remedy}"
            )
        if changed:
            warnings.warn(
                f"the gradient of {names[changed[0]]!r} was changed between backward and step(). The change "
                "counts here, because gradients travel in step(). With a spare core they travel during backward, and "
                f"the change is an error; {self._binding.change_remedy}",
                stacklevel=3,
            )

    def _combine(self) -> None:
        if not self._is_compared:
            self._compare()
        errors = self._agree_on_number()
        failed = self._lead() if errors else None
        if not errors or isinstance(errors[0], MismatchError | InvalidRequestError):
            for bucket in dict.fromkeys(self.buckets.values()):  # the others may have sent theirs already
                if bucket not in self._reductions and bucket is not failed:
                    self._send(bucket)
        errors += self._finish()
        if errors:
            raise next((error for error in errors if isinstance(error, InvalidRequestError)), errors[0])

    def _compare(self) -> None:
        """Where the parameters of the ranks match by position, and only the names differ, the names become equal."""
        process_set, inventory = self.options.process_set, self.inventory
        if process_set.included():
            agreed = agreed_names(inventory.model(), lambda: rivals.models(process_set), process_set)
            inventory.rename(agreed.names)
            self._is_compared = agreed.is_final

    def _agree_on_number(self) -> list[Failure]:
        """The lead bucket goes ahead alone until the ranks agree on a number, and so on the other names."""
        lead = None if self.claim.is_agreed else self._lead()
        if lead is None:
            return []
        self._send(lead)
        try:
            is_complete = False  # a compressor may send nothing at all
            while not (self.claim.is_agreed or is_complete):
                is_complete = self._reductions[lead].advance()
        except (HorovodInternalError, InvalidRequestError) as error:
            self._reductions.pop(lead).abandon()
            return [error]
        return []

    def _finish(self) -> list[Failure]:
        """The errors of the reductions, when nothing is in flight any more, so that the step can be repeated.

        The lead bucket comes first: a rank that must agree on the number has not sent the others.
        """
        waiting = sorted(self._reductions.values(), key=lambda reduction: not reduction.leads)
        errors: list[Failure] = []
        while waiting:
            going = []
            for reduction in waiting:
                try:
                    if not reduction.advance():
                        going.append(reduction)
                except (HorovodInternalError, InvalidRequestError) as error:
                    errors.append(error)
                    reduction.abandon()
            waiting = going
        return errors

    # The state between steps.

    def set_passes(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        check_passes(passes)
        self._progress.set_passes(passes)

    def forget(self, caller: str = "forget") -> None:
        """Reset to the state before the first gradient. AssertionError, with the ``caller``, if some are in flight."""
        if self._reductions and self._has_left():
            self.discard()
        if self._reductions:
            raise AssertionError(f"{caller}() was called while gradients are in flight; {self._binding.send_remedy}")
        self._progress.forget()

    def restart(self) -> None:
        """Forget gradients, in flight or not, and the state of compressors."""
        self.discard()
        self.inventory.restart_compressors()

    def discard(self) -> None:
        """Forget gradients, in flight or not."""
        for reduction in self._reductions.values():
            reduction.abandon()
        self._reductions.clear()
        self.forget()

    def _has_left(self) -> bool:
        """Whether the world in which this rank combined gradients last has ended."""
        try:
            return basics.engine() is not self._engine()
        except NotInitializedError:
            return True

    def _begin_again(self, engine: Engine) -> None:
        """The ranks are others, some of them new: nothing counts on which those of the earlier world have agreed."""
        self.discard()
        self._engine = weakref.ref(engine)
        self.claim.enter(engine)
        self._is_compared = False
        self.inventory.begin_again()

    def has_all_gradients(self) -> bool:
        """Whether every trained parameter has a gradient."""
        binding = self._binding
        return all(binding.gradient(each) is not None for each in self.inventory.parameters if binding.is_trained(each))
