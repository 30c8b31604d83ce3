"""The buckets of one optimizer that are in flight, from the first one that was sent to the end of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from collectives import HorovodInternalError, InvalidRequestError, Operation
from hvd_cluster.ops.refused_calls import refuse
from hvd_cluster.torch.optimizer.inventory import Inventory
from hvd_cluster.torch.optimizer.reduction import BucketReduction, EarlyGradients, full_name
from hvd_cluster.torch.optimizer.transfers import Bucket, Setup

Failure: TypeAlias = HorovodInternalError | InvalidRequestError
Members: TypeAlias = Callable[[Bucket], list[torch.Tensor]]
"""The parameters of a bucket that have a gradient in this step."""


class BucketsInFlight:
    """``reductions`` has those of the present ``attempt``, ``given_up`` those that count no more."""

    def __init__(self, inventory: Inventory, setup: Setup) -> None:
        self.reductions: dict[Bucket, BucketReduction] = {}
        self.given_up: list[BucketReduction] = []
        self.attempt = EarlyGradients()
        self._inventory = inventory
        self._setup = setup

    def give_up(self) -> None:
        """Let the gradients in flight count no more. Nobody waits for them before the end of the step."""
        names = [full_name(bucket, self._setup) for bucket in self.reductions]
        for bucket, reduction in self.reductions.items():
            bucket.packs = {}  # whose memory is still in use
            self.given_up.append(reduction)
        self.reductions.clear()
        self.attempt.give_up(names)

    def end_step(self) -> None:
        """The step has ended, and nothing is in flight."""
        self.reductions.clear()
        self.given_up.clear()
        self.attempt.end_step()

    def abandon(self) -> None:
        """Wait until nothing is in flight, because the step of this world was cut off."""
        for reduction in (*self.reductions.values(), *self.given_up):
            reduction.abandon()
        self.reductions.clear()
        self.given_up.clear()
        self.attempt = EarlyGradients()

    def agree_on_number(self, lead: Bucket) -> list[Failure]:
        """The lead bucket goes ahead alone until the ranks agree on a number, and so on the other names."""
        claim = self._setup.claim
        try:
            is_complete = False  # a compressor may send nothing at all
            while not (claim.is_agreed or is_complete):
                is_complete = self.reductions[lead].advance()
        except (HorovodInternalError, InvalidRequestError) as error:
            self.reductions.pop(lead).abandon()
            return [error]
        return []

    def finish(self, lead: Bucket | None, members: Members, send: Callable[[Bucket], None]) -> list[Failure]:
        """The errors of the reductions, when nothing is in flight any more, so that the step can be repeated.

        The lead bucket comes first: a rank that must agree on the number has not sent the others. Then all ranks wait
        in one order, whatever they sent first: a bucket with sparse gradients starts further rounds, and ends them.
        """
        errors = self._await_lead()
        if self.attempt.must_repeat:
            self._repeat(send)
        if self.attempt.must_complete:
            self._complete(lead, members)
        order = dict.fromkeys((*self._inventory.all_buckets(), *self.reductions))
        waiting = [self.reductions[bucket] for bucket in order if bucket in self.reductions]
        while waiting:
            waiting = self._advance(waiting, errors)
        for reduction in self.given_up:
            reduction.abandon()
        return errors

    def _advance(self, waiting: list[BucketReduction], errors: list[Failure]) -> list[BucketReduction]:
        going = []
        for reduction in waiting:
            try:
                if not reduction.advance():
                    going.append(reduction)
            except (HorovodInternalError, InvalidRequestError) as error:
                errors.append(error)
                reduction.abandon()
        return going

    def _await_lead(self) -> list[Failure]:
        """Wait until the ranks have agreed which attempt counts; until then no gradient changes."""
        lead = next((bucket for bucket, reduction in self.reductions.items() if reduction.leads), None)
        if lead is None:
            return []
        reduction = self.reductions[lead]
        try:
            while not (reduction.has_passed or reduction.advance()):
                pass
        except (HorovodInternalError, InvalidRequestError) as error:
            self.reductions.pop(lead).abandon()
            return [error]
        if not reduction.has_passed:
            del self.reductions[lead]
        return []

    def _repeat(self, send: Callable[[Bucket], None]) -> None:
        """Another rank has given up the first attempt: send all but the lead bucket again."""
        leading = {bucket: reduction for bucket, reduction in self.reductions.items() if reduction.leads}
        for bucket in leading:
            del self.reductions[bucket]
        repeated = list(self.reductions)
        self.give_up()
        for bucket in repeated:
            send(bucket)
        self.reductions.update(leading)

    def _complete(self, lead: Bucket | None, members: Members) -> None:
        """Other ranks may wait for buckets of the first attempt that this rank has not sent."""
        sent = self.attempt.sent or ()
        for bucket in self._inventory.all_buckets():
            name = full_name(bucket, self._setup)
            if bucket is not lead and name not in sent and members(bucket):
                error = InvalidRequestError("this rank has thrown its gradients away")
                length = 1 if bucket.is_group else None
                refuse(error, Operation.ALLREDUCE, name, self._setup.options.process_set, length)
