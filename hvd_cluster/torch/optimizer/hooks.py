"""The hooks that report complete gradients: a bucket of them travels during backward, or else in the step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from collectives import Engine, InvalidRequestError, MismatchError, NotInitializedError
from hvd_cluster.comparison.meeting import agreed_names
from hvd_cluster.core import basics
from hvd_cluster.gradients.duplicate_names import OptimizerEntry, optimizers
from hvd_cluster.gradients.options import Options, check_passes
from hvd_cluster.torch.optimizer.in_flight import BucketsInFlight, Failure
from hvd_cluster.torch.optimizer.inventory import Inventory, Names, groups_of
from hvd_cluster.torch.optimizer.reduction import BucketReduction
from hvd_cluster.torch.optimizer.rows import Portions
from hvd_cluster.torch.optimizer.transfers import Bucket, Originals, Setup, Spares, is_same_list, pack_of

State: TypeAlias = tuple[object, int]
CHANGE_REMEDY = (
    "to clip or to unscale gradients, call optimizer.synchronize(), change them, and call step(), or scaler.step(), "
    "inside optimizer.skip_synchronize()"
)
SEND_REMEDY = (
    "call step() or synchronize() first, on all ranks, also after a backward that failed. If a backward reaches "
    "parameters that it does not train, as that of a generator reaches its discriminator, call requires_grad_(False) "
    "on them before the forward, and requires_grad_(True) after it"
)
REPEAT_REMEDY = (
    "with activation checkpointing, give it use_reentrant=False: the older kind computes gradients once for each call "
    "of a layer"
)


def _state(parameter: torch.Tensor) -> State:
    """An object that stands for the gradient, and for no other one as long as it exists; and the version.

    The version grows by one with each change in place.
    """
    gradient = parameter.grad
    return (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)


class PassCounts:
    """``countdown`` has the backward passes that each gradient lacks; it is complete at 0, after ``passes`` of them.

    ``states`` has the state of each gradient after its last pass, or after it was sent.
    """

    def __init__(self, passes: int) -> None:
        self.passes = passes
        self.countdown: dict[torch.Tensor, int] = {}
        self.states: dict[torch.Tensor, State] = {}

    def count(self, parameter: torch.Tensor) -> int:
        """A pass has reached ``parameter``; returns the number of passes that its gradient lacks, below 0 if too many.

        The earlier passes do not count if the gradient was replaced since.
        """
        state = _state(parameter)
        gradient, version = self.states.get(parameter, (self, 0))
        has_grown = state[0] is gradient and state[1] == version + 1
        self.states[parameter] = state
        return (self.countdown.get(parameter, self.passes) if has_grown else self.passes) - 1

    def note(self, bucket: Bucket) -> None:
        """The gradients of ``bucket`` were sent."""
        self.states.update({each: _state(each) for each in bucket.parameters if each in self.states})

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after ``passes`` passes; those that are complete stay so."""
        self.passes = passes
        self.countdown = {parameter: left for parameter, left in self.countdown.items() if left == 0}

    def changed(self) -> list[torch.Tensor]:
        """Parameters with gradients that were changed after they were complete, or after they were sent."""
        changed = self._changed()
        return [each for each in changed if self.countdown.get(each) == 0] if changed else changed

    def partial(self) -> int:
        """The number of passes since the last step, if they are too few; 0 if a gradient is complete, or none is left.

        A gradient that was thrown away since counts no more.
        """
        if self.passes == 1:
            return 0
        changed = set(self._changed())
        left = [left for each, left in self.countdown.items() if each not in changed]
        return self.passes - min(left) if left and 0 < min(left) < self.passes else 0

    def _changed(self) -> list[torch.Tensor]:
        return [
            each
            for each, (gradient, version) in self.states.items()
            if (now := _state(each))[0] is not gradient or now[1] != version
        ]

    def forget(self) -> None:
        """No gradient has seen a pass."""
        self.countdown, self.states = {}, {}


class GradientCombiner:
    """Combines the gradients of the parameters of one optimizer over all ranks.

    ``optimizer`` is in use as long as this object has to combine anything; this object must not keep it alive, because
    an optimizer that was replaced must not send gradients. ``names`` are those that the user gave. After ``passes``
    backward passes a gradient is complete. Of the gradients in ``division`` each rank gets its portion only; they must
    be :meth:`lone`, and the same on all ranks. With ``sends_ahead`` False all gradients travel in the step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Names, passes: int, options: Options) -> None:
        self.options = options
        self.inventory = inventory = Inventory(groups_of(optimizer), names, options)
        self.buckets = inventory.buckets
        self.progress = PassCounts(passes)
        self.division: Mapping[torch.Tensor, Portions] = {}
        self.sends_ahead = True
        self._optimizer = weakref.ref(optimizer)
        self._watches: dict[torch.Tensor, RemovableHandle] = {}
        self._unwatched: list[torch.Tensor] = []
        self._is_sole_owner = self._is_compared = self._has_warned_of_partial = False
        member = OptimizerEntry(
            options.process_set,
            inventory.names_in_use,
            lambda: inventory.buckets,
            lambda: self.is_under_way,
            inventory.model,
        )
        self.claim = optimizers.add(optimizer, member)
        self.spares = Spares()
        self._setup = Setup(inventory.names, inventory.compressors, options, self.claim, self.spares)
        self._flight = BucketsInFlight(inventory, self._setup)
        self._reductions = self._flight.reductions
        self._enter(basics.engine())
        self.adopt()

    def _enter(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._is_member = bool(self.options.process_set.included())
        self.claim.enter(engine)

    def adopt(self) -> None:
        """Take in the parameters that were added, removed, or made trainable since the last call."""
        optimizer = self._optimizer()
        if not self._is_member or optimizer is None:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not is_same_list(parameters, self.inventory.parameters):
            for parameter in self.inventory.arrange(parameters, self.is_under_way):
                if parameter in self._watches:
                    self._watches.pop(parameter).remove()
            self._unwatched = [parameter for parameter in parameters if parameter not in self._watches]
        if self._unwatched:
            for parameter in self._unwatched:
                if parameter.requires_grad:
                    self._watches[parameter] = self._watch(parameter)
            self._unwatched = [parameter for parameter in self._unwatched if parameter not in self._watches]

    def _watch(self, parameter: torch.Tensor) -> RemovableHandle:
        """Report each gradient of ``parameter`` when backward has finished it, as long as the optimizer is in use."""
        reference: Callable[[], Any] = self._optimizer

        def hook(parameter: torch.Tensor) -> None:
            optimizer = reference()
            if optimizer is None:
                handle.remove()
            else:
                optimizer._synchronized = optimizer._combined_for_step = False
                optimizer._combiner.on_gradient(parameter)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle

    def release(self) -> None:
        """Watch no gradient any more: another object is to combine them."""
        for handle in self._watches.values():
            handle.remove()
        self._watches.clear()
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizers.remove(optimizer)

    # Backward.

    @property
    def is_under_way(self) -> bool:
        """Whether there are gradients, complete or in flight, that no step has used."""
        return bool(self._reductions or self._flight.given_up or self.progress.countdown)

    @property
    def is_in_flight(self) -> bool:
        """Whether gradients are in flight."""
        return bool(self._reductions)

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete for this pass; it is sent if its bucket is complete.

        AssertionError for more passes than agreed.
        """
        engine = basics.engine()
        if engine is not self._engine():
            self._begin_again(engine)
        if engine.topology.size == 1:
            return
        progress = self.progress
        if not (self._reductions or progress.countdown):
            self.adopt()
        bucket = self.buckets.get(parameter)
        if bucket is None:  # removed
            return
        left = progress.count(parameter)
        if left < 0:
            raise AssertionError(
                f"the gradient of {self._setup.names[parameter]!r} was computed more than backward_passes_per_step="
                f"{progress.passes} times before step(). Raise backward_passes_per_step, or {SEND_REMEDY}; passes that "
                f"are left over at the end of an epoch count, too; {REPEAT_REMEDY}"
            )
        progress.countdown[parameter] = left
        if bucket in self._reductions:  # the script has thrown the earlier gradient away
            self._flight.give_up()
        if left == 0 and self._is_eager(engine) and self._may_travel(bucket):
            self._send_early(bucket)

    def _is_eager(self, engine: Engine) -> bool:
        return self.sends_ahead and not engine.patient

    def lone(self) -> list[torch.Tensor]:
        """The parameters whose gradients travel in place: large, uncompressed, and alone in their buckets."""
        return [
            parameter
            for parameter, bucket in self.buckets.items()
            if len(bucket.parameters) == 1
            and self._setup.compressors[parameter].is_identity
            and pack_of(self._setup.compressors[parameter], parameter) is None
        ]

    def _may_travel(self, bucket: Bucket) -> bool:
        """Whether ``bucket`` is complete, and may travel before the step.

        Its names must be certain to be those of the other ranks. The lead bucket travels in the step, see
        :class:`EarlyGradients`.
        """
        is_safe = self.claim.is_agreed and self._flight.attempt.allows_ahead() and self.inventory.is_repeatable
        return is_safe and self._is_ready(bucket) and bucket is not self._lead() and self._is_plain(bucket)

    def _is_plain(self, bucket: Bucket) -> bool:
        """Whether ``.grad`` stays what it is when ``bucket`` is sent; no gradient is absent or becomes sparse."""
        as_dense = self.options.sparse_as_dense
        for parameter in self._members(bucket):
            gradient = parameter.grad
            if gradient is None:
                return False
            if not (as_dense if gradient.is_sparse else parameter not in bucket.sparse):
                return False
        return True

    def _is_ready(self, bucket: Bucket) -> bool:
        """The check starts with the parameter that backward is likely to reach last, so it usually ends at once."""
        countdown = self.progress.countdown
        return all(countdown.get(each) == 0 for each in reversed(bucket.parameters) if each.requires_grad)

    def _send_early(self, bucket: Bucket) -> None:
        try:
            self._send(bucket, is_ahead=True)
        except Exception:  # the step can be repeated
            for parameter in bucket.parameters:
                self.progress.countdown.pop(parameter, None)
            raise
        self.progress.note(bucket)

    def _send(self, bucket: Bucket, is_ahead: bool = False) -> None:
        """Combine the gradients of parameters that are trained, or were until backward; a missing gradient is zeros."""
        members = self._members(bucket)
        if not members:
            return
        leads, attempt = bucket is self._lead(), self._flight.attempt
        portions = self.division.get(bucket.parameters[0])
        keeps = attempt.is_shared and attempt.sent is None and not leads and self.inventory.is_repeatable
        originals = Originals(is_ahead) if keeps and portions is None else None
        if not self._is_sole_owner:
            self._require_sole_owner()
        with torch.no_grad():
            reduction = BucketReduction(bucket, members, self._setup, attempt, leads, originals, portions)
            self._reductions[bucket] = reduction

    def _members(self, bucket: Bucket) -> list[torch.Tensor]:
        countdown = self.progress.countdown
        return [each for each in bucket.parameters if each.requires_grad or each in countdown]

    def _lead(self) -> Bucket | None:
        """The bucket of the first parameter that is trained: backward completes it last."""
        countdown = self.progress.countdown
        for parameter in self.inventory.parameters:
            if parameter.requires_grad or parameter in countdown:
                return self.buckets[parameter]
        return None

    def _require_sole_owner(self) -> None:
        optimizers.collect_garbage()
        for other in optimizers.all():
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
        engine = basics.engine()
        if engine is not self._engine():
            self._begin_again(engine)
        self.adopt()
        changed, partial, names = self.progress.changed(), self.progress.partial(), self._setup.names
        self._flight.attempt.begin_step(self._is_eager(engine))
        if self._is_in_vain():
            self._flight.give_up()
        try:
            self._combine()
        finally:
            self._flight.end_step()
            self.forget()
        self._warn_of_partial(partial, "step() combines the gradients of")
        if changed:
            warnings.warn(
                f"the gradient of {names[changed[0]]!r} was changed between backward and step(): each rank has changed "
                "its own gradient, and the changed ones are combined, in step() instead of during backward; "
                f"{CHANGE_REMEDY}",
                stacklevel=3,
            )

    def _is_in_vain(self) -> bool:
        """Whether the buckets in flight would hold other gradients by now, or one of them is the lead bucket."""
        reductions = self._reductions
        return bool(reductions) and (
            self._lead() in reductions
            or any([reduction.is_outdated(self._members(bucket)) for bucket, reduction in reductions.items()])
        )

    def _combine(self) -> None:
        if not self._is_compared:
            self._compare()
        lead, failed = self._lead(), None
        errors: list[Failure] = []
        if not self.claim.is_agreed and lead is not None:
            self._send(lead)
            errors = self._flight.agree_on_number(lead)
            failed = lead if errors else None
        if not errors or isinstance(errors[0], MismatchError | InvalidRequestError):
            for bucket in dict.fromkeys(self.buckets.values()):  # the others may have sent theirs already
                if bucket not in self._reductions and bucket is not failed:
                    self._send(bucket)
        errors += self._flight.finish(lead, self._members, self._send)
        if errors:
            raise next((error for error in errors if isinstance(error, InvalidRequestError)), errors[0])

    def _compare(self) -> None:
        """Where the parameters of the ranks match by position, and only the names differ, the names become equal."""
        process_set, inventory = self.options.process_set, self.inventory
        if self._is_member:
            agreed = agreed_names(inventory.model(), lambda: optimizers.models(process_set), process_set)
            inventory.rename(agreed.names)
            self._is_compared = agreed.is_final

    def _warn_of_partial(self, partial: int, event: str) -> None:
        """Once, because it is right in the last step of an epoch. The caller of the caller's caller is the script's."""
        if partial and not self._has_warned_of_partial:
            self._has_warned_of_partial = True
            passes = self.progress.passes
            warnings.warn(
                f"{event} {partial} of backward_passes_per_step={passes} backward passes. Call backward() {passes} "
                "times before each step(); with passes that are left over at the end of an epoch, call step() before "
                "the next epoch to use their gradients, or zero_grad() to throw them away. This is said once for each "
                "optimizer",
                stacklevel=4,
            )

    # The state between steps.

    def set_passes(self, passes: int) -> None:
        """From now on gradients add up over ``passes`` passes; InvalidRequestError unless it is a positive integer."""
        check_passes(passes)
        self.progress.set_passes(passes)

    def throw_away(self) -> None:
        """The script wants no gradient that no step has used; see :meth:`forget`."""
        partial = self.progress.partial()
        self.forget()
        self._warn_of_partial(partial, "zero_grad() throws away the gradients of")

    def forget(self) -> None:
        """Reset to the state before the first gradient. Those in flight do not count."""
        if (self._reductions or self._flight.given_up) and self._has_left():
            self._flight.abandon()
        if self._reductions:
            self._flight.give_up()
        self.progress.forget()

    def restart(self) -> None:
        """Forget gradients, in flight or not, and the state of compressors."""
        self.forget()
        self.inventory.restart_compressors()

    def discard(self) -> None:
        """Forget gradients, in flight or not, because the step of this world was cut off."""
        self._flight.abandon()
        self.progress.forget()

    def _has_left(self) -> bool:
        """Whether the world in which this rank combined gradients last has ended."""
        try:
            return basics.engine() is not self._engine()
        except NotInitializedError:
            return True

    def _begin_again(self, engine: Engine) -> None:
        """The ranks are others, some of them new: nothing counts on which those of the earlier world have agreed."""
        self.discard()
        self._enter(engine)
        self._is_compared = False
        self.inventory.begin_again()

    def has_all_gradients(self) -> bool:
        """Whether every trained parameter has a gradient."""
        return all(each.grad is not None for each in self.inventory.parameters if each.requires_grad)
