"""The backward passes that each gradient has seen."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeAlias, TypeVar

from collectives.api import HorovodInternalError, InvalidRequestError, MismatchError, NotInitializedError, Operation
from collectives.engine.engine import Engine
from hvd_cluster.comparison.meeting import agreed_names
from hvd_cluster.core import basics
from hvd_cluster.gradients.attempt import EarlyGradients
from hvd_cluster.gradients.binding import Binding
from hvd_cluster.gradients.bucket import Bucket, Setup
from hvd_cluster.gradients.duplicate_names import OptimizerEntry, rivals
from hvd_cluster.gradients.inventory import Inventory
from hvd_cluster.gradients.options import Options, check_passes
from hvd_cluster.gradients.reduction import BucketReduction, full_name
from hvd_cluster.gradients.transfers import Originals
from hvd_cluster.ops.refusals import refuse

P = TypeVar("P")
State: TypeAlias = tuple[object, int]


class PassCounts(Generic[P]):
    """``countdown`` has the backward passes that each gradient lacks; it is complete at 0, after ``passes`` of them.

    ``states`` has the :meth:`Binding.state` of each gradient after its last pass, or after it was sent.
    """

    def __init__(self, binding: Binding[P], passes: int) -> None:
        self.passes = passes
        self.countdown: dict[P, int] = {}
        self.states: dict[P, State] = {}
        self._binding = binding

    def count(self, parameter: P) -> int:
        """A pass has reached ``parameter``; returns the number of passes that its gradient lacks, below 0 if too many.

        The earlier passes do not count if the gradient was replaced since.
        """
        state = self._binding.state(parameter)
        gradient, version = self.states.get(parameter, (self, 0))
        has_grown = state[0] is gradient and state[1] == version + 1
        self.states[parameter] = state
        return (self.countdown.get(parameter, self.passes) if has_grown else self.passes) - 1

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after ``passes`` passes; those that are complete stay so."""
        self.passes = passes
        self.countdown = {parameter: left for parameter, left in self.countdown.items() if left == 0}

    def changed(self) -> list[P]:
        """Parameters with gradients that were changed after they were complete, or after they were sent."""
        countdown = self.countdown
        return [each for each in self._changed() if countdown.get(each) == 0]

    def partial(self) -> int:
        """The number of passes since the last step, if they are too few; 0 if a gradient is complete, or none is left.

        A gradient that was thrown away since counts no more.
        """
        if self.passes == 1:
            return 0
        changed = set(self._changed())
        left = [left for each, left in self.countdown.items() if each not in changed]
        return self.passes - min(left) if left and 0 < min(left) < self.passes else 0

    def _changed(self) -> list[P]:
        state = self._binding.state
        return [
            each
            for each, (gradient, version) in self.states.items()
            if (now := state(each))[0] is not gradient or now[1] != version
        ]

    def forget(self) -> None:
        """No gradient has seen a pass."""
        self.countdown, self.states = {}, {}


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
        member = OptimizerEntry(
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
        self._reductions: dict[Bucket[P], BucketReduction[P]] = {}
        self._given_up: list[BucketReduction[P]] = []
        self._attempt = EarlyGradients()
        self._progress = PassCounts(binding, passes)
        self._has_warned_of_partial = False
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
        return bool(self._reductions or self._given_up or self._progress.countdown)

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
        if left < 0:
            raise AssertionError(
                f"the gradient of {self._setup.names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self.passes} times before step(). Raise backward_passes_per_step, or {self._binding.send_remedy}; "
                f"passes that are left over at the end of an epoch count, too; {self._binding.repeat_remedy}"
            )
        progress.countdown[parameter] = left
        if bucket in self._reductions:  # the script has thrown the earlier gradient away
            self._give_up()
        if left == 0 and not engine.patient and self._may_travel(bucket):
            self._send_early(bucket)

    def _may_travel(self, bucket: Bucket[P]) -> bool:
        """Whether ``bucket`` is complete, and may travel before the step.

        Its names must be certain to be those of the other ranks. The lead bucket travels in the step, see
        :mod:`hvd_cluster.gradients.attempt`.
        """
        is_safe = self.claim.is_agreed and self._attempt.allows_ahead() and self.inventory.is_repeatable
        return is_safe and self._is_ready(bucket) and bucket is not self._lead() and self._is_plain(bucket)

    def _is_plain(self, bucket: Bucket[P]) -> bool:
        """Whether ``.grad`` stays what it is when ``bucket`` is sent; no gradient is absent or becomes sparse."""
        binding, as_dense = self._binding, self.options.sparse_as_dense
        for parameter in self._members(bucket):
            gradient = binding.gradient(parameter)
            if gradient is None:
                return False
            is_sparse = binding.sparse_dimensions(gradient) is not None
            if not (as_dense if is_sparse else parameter not in bucket.sparse):
                return False
        return True

    def _is_ready(self, bucket: Bucket[P]) -> bool:
        """The check starts with the parameter that backward is likely to reach last, so it usually ends at once."""
        countdown, is_trained = self._progress.countdown, self._binding.is_trained
        return all(countdown.get(each) == 0 for each in reversed(bucket.parameters) if is_trained(each))

    def _send_early(self, bucket: Bucket[P]) -> None:
        try:
            self._send(bucket, is_ahead=True)
        except Exception:  # the step can be repeated
            for parameter in bucket.parameters:
                self._progress.countdown.pop(parameter, None)
            raise
        states, state = self._progress.states, self._binding.state
        states.update({each: state(each) for each in bucket.parameters if each in states})

    def _send(self, bucket: Bucket[P], is_ahead: bool = False) -> None:
        """Combine the gradients of parameters that are trained, or were until backward; a missing gradient is zeros."""
        members = self._members(bucket)
        if not members:
            return
        leads = bucket is self._lead()
        keeps = self._attempt.is_shared and self._attempt.sent is None and not leads and self.inventory.is_repeatable
        originals = Originals(self._binding, is_ahead) if keeps else None
        self._require_sole_owner()
        with self._binding.unrecorded():
            self._reductions[bucket] = BucketReduction(bucket, members, self._setup, self._attempt, leads, originals)

    def _members(self, bucket: Bucket[P]) -> list[P]:
        is_trained, countdown = self._binding.is_trained, self._progress.countdown
        return [each for each in bucket.parameters if is_trained(each) or each in countdown]

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
        HorovodInternalError when a rank is lost.
        """
        if basics.engine() is not self._engine():
            self._begin_again(basics.engine())
        self.adopt()
        changed, partial, names = self._progress.changed(), self._progress.partial(), self._setup.names
        self._attempt.begin_step(not basics.engine().patient)
        if self._is_in_vain():
            self._give_up()
        try:
            self._combine()
        finally:
            self._reductions.clear()
            self._given_up.clear()
            self._attempt.end_step()
            self.forget()
        self._warn_of_partial(partial, "step() combines the gradients of")
        if changed:
            warnings.warn(
                f"the gradient of {names[changed[0]]!r} was changed between backward and step(): each rank has changed "
                "its own gradient, and the changed ones are combined, in step() instead of during backward; "
                f"{self._binding.change_remedy}",
                stacklevel=3,
            )

    def _is_in_vain(self) -> bool:
        """Whether the buckets in flight would hold other gradients by now, or one of them is the lead bucket."""
        reductions = self._reductions
        return self._lead() in reductions or any(
            reductions[bucket].is_outdated(self._members(bucket)) for bucket in reductions
        )

    def _give_up(self) -> None:
        """Let the gradients in flight count no more. Nobody waits for them before the end of the step."""
        names = [full_name(bucket, self._setup) for bucket in self._reductions]
        for bucket, reduction in self._reductions.items():
            bucket.packs = {}  # whose memory is still in use
            self._given_up.append(reduction)
        self._reductions.clear()
        self._attempt.give_up(names)

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

        The lead bucket comes first: a rank that must agree on the number has not sent the others. Then all ranks wait
        in one order, whatever they sent first: a bucket with sparse gradients starts further rounds, and ends them.
        """
        errors = self._await_lead()
        if self._attempt.must_repeat:
            self._repeat()
        if self._attempt.must_complete:
            self._complete()
        order = dict.fromkeys((*self.buckets.values(), *self._reductions))
        waiting = [self._reductions[bucket] for bucket in order if bucket in self._reductions]
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
        for reduction in self._given_up:
            reduction.abandon()
        return errors

    def _await_lead(self) -> list[Failure]:
        """Wait until the ranks have agreed which attempt counts; until then no gradient changes."""
        lead = next((bucket for bucket, reduction in self._reductions.items() if reduction.leads), None)
        if lead is None:
            return []
        reduction = self._reductions[lead]
        try:
            while not (reduction.has_passed or reduction.advance()):
                pass
        except (HorovodInternalError, InvalidRequestError) as error:
            self._reductions.pop(lead).abandon()
            return [error]
        if not self._reductions[lead].has_passed:
            del self._reductions[lead]
        return []

    def _repeat(self) -> None:
        """Another rank has given up the first attempt: send all but the lead bucket again."""
        leading = {bucket: reduction for bucket, reduction in self._reductions.items() if reduction.leads}
        for bucket in leading:
            del self._reductions[bucket]
        repeated = list(self._reductions)
        self._give_up()
        for bucket in repeated:
            self._send(bucket)
        self._reductions.update(leading)

    def _complete(self) -> None:
        """Other ranks may wait for buckets of the first attempt that this rank has not sent."""
        sent, lead = self._attempt.sent or (), self._lead()
        for bucket in dict.fromkeys(self.buckets.values()):
            name = full_name(bucket, self._setup)
            if bucket is not lead and name not in sent and self._members(bucket):
                error = InvalidRequestError("this rank has thrown its gradients away")
                length = 1 if bucket.is_group else None
                refuse(error, Operation.ALLREDUCE, name, self.options.process_set, length)

    def _warn_of_partial(self, partial: int, event: str) -> None:
        """Once, because it is right in the last step of an epoch. The caller of the caller's caller is the script's."""
        if partial and not self._has_warned_of_partial:
            self._has_warned_of_partial = True
            warnings.warn(
                f"{event} {partial} of backward_passes_per_step={self.passes} backward passes. Call backward() "
                f"{self.passes} times before each step(); with passes that are left over at the end of an epoch, call "
                "step() before the next epoch to use their gradients, or zero_grad() to throw them away. This is said "
                "once for each optimizer",
                stacklevel=4,
            )

    # The state between steps.

    def set_passes(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        check_passes(passes)
        self._progress.set_passes(passes)

    def throw_away(self) -> None:
        """The script wants no gradient that no step has used; see :meth:`forget`."""
        partial = self._progress.partial()
        self.forget()
        self._warn_of_partial(partial, "zero_grad() throws away the gradients of")

    def forget(self) -> None:
        """Reset to the state before the first gradient. Those in flight do not count."""
        if (self._reductions or self._given_up) and self._has_left():
            self.discard()
        if self._reductions:
            self._give_up()
        self._progress.forget()

    def restart(self) -> None:
        """Forget gradients, in flight or not, and the state of compressors."""
        self.forget()
        self.inventory.restart_compressors()

    def discard(self) -> None:
        """Forget gradients, in flight or not, because the step of this world was cut off."""
        for reduction in (*self._reductions.values(), *self._given_up):
            reduction.abandon()
        self._reductions.clear()
        self._given_up.clear()
        self._attempt = EarlyGradients()
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
