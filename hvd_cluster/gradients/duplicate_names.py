"""Numbers that tell apart the optimizers of a process that use the same parameter names.

A generator and a discriminator may both have a parameter "weight", and their gradients must not meet under one name.
So the names of an optimizer's tensors carry its number. No counter gives it: ranks may have made, copied, kept or
dropped different optimizers. Each rank proposes a number, and the first step of the optimizer compares the proposals.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvd_cluster.comparison.models import Model
from hvd_cluster.comparison.twins import ModelPlace, are_swapped
from hvd_cluster.core.process_sets import ProcessSet

ALONE = ModelPlace(0, 1)
LARGEST_BUSY = 60
"""A larger number has no bit in a message; a rank does not report that it is busy."""


@dataclass(frozen=True)
class OptimizerEntry:
    """An optimizer, as those with the same names see it.

    ``names`` are those of its parameters, ``parameters`` the parameters themselves, ``model`` is for the other ranks;
    ``is_busy``: it has gradients, complete or in flight, that no step has used.
    """

    process_set: ProcessSet
    names: Callable[[], set[str]]
    parameters: Callable[[], Container[Hashable]]
    is_busy: Callable[[], bool]
    model: Callable[[], Model]


class Proposal(NamedTuple):
    """The number that a rank proposes for an optimizer.

    ``is_agreed``: the ranks of an earlier step have agreed on it. ``busy`` has bit n set where another optimizer of the
    rank has the number n and gradients under way. ``place``: see :attr:`Claim.place`.
    """

    number: int
    is_agreed: bool
    busy: int
    place: ModelPlace = ALONE


def choose(proposals: Sequence[Proposal]) -> int | None:
    """The number for all ranks, the same on each; None where they step different optimizers.

    That is the number on which some ranks agreed before, otherwise the largest one, which is free on all ranks.
    """
    agreed = {proposal.number for proposal in proposals if proposal.is_agreed}
    if len(agreed) > 1 or (not agreed and are_swapped({rank: each.place for rank, each in enumerate(proposals)})):
        return None
    number = max(agreed or {proposal.number for proposal in proposals})
    is_taken = any(proposal.busy >> number & 1 for proposal in proposals if not proposal.is_agreed)
    return None if is_taken else number


class Claim:
    """The ``number`` of one optimizer, None before its first use; ``prefix`` is that of the names of its tensors."""

    def __init__(self, registry: DuplicateNames, member: OptimizerEntry) -> None:
        self._set_number(None)
        self.is_agreed = False
        self.member = member
        self._registry = registry
        self._seen: tuple[int, int] | None = None
        self._has_duplicates = False
        self._world: weakref.ref[object] | None = None

    def enter(self, world: object) -> None:
        """Numbers of earlier worlds than ``world`` do not count, those of duplicates included: newcomers know none."""
        for each in (self, *self._registry.of(self)):
            if each._world is None or each._world() is not world:
                each._set_number(None)
                each.is_agreed, each._world = False, weakref.ref(world)

    def _set_number(self, number: int | None) -> None:
        self.number = number
        self.prefix = f"optimizer{number}." if number else ""

    @property
    def has_duplicates(self) -> bool:
        """Whether an optimizer of this rank has the same parameter names and ranks."""
        state = self._registry.state
        if state != self._seen:
            self._seen, self._has_duplicates = state, bool(self._registry.of(self))
        return self._has_duplicates

    @property
    def place(self) -> ModelPlace:
        """That among the optimizers of the same ranks whose models are alike, in the order in which they were made.

        The ranks compare it once: it does not count any more when they have agreed.
        """
        if self.is_agreed or not self.has_duplicates:
            return ALONE
        model = self.member.model()
        alike = [each for each in self._registry.all() if each is self or self._is_alike(each, model)]
        return ModelPlace(alike.index(self), len(alike)) if self in alike else ALONE

    def _is_alike(self, other: Claim, model: Model) -> bool:
        return other.member.process_set is self.member.process_set and other.member.model() == model

    def propose(self) -> Proposal:
        """The number of this optimizer, or the next above those of its duplicates."""
        others = [each for each in self._registry.of(self) if each.number is not None]
        if self.number is None:
            self._set_number(max((each.number or 0 for each in others), default=-1) + 1)
        busy = {each.number or 0 for each in others if each.member.is_busy()}
        bits = sum(1 << number for number in busy if number <= LARGEST_BUSY)
        return Proposal(self.number or 0, self.is_agreed, bits, self.place)

    def adopt(self, number: int) -> None:
        """All ranks have agreed on ``number``; a duplicate that has it gets another one with its next step."""
        for each in self._registry.of(self):
            if each.number == number:
                each._set_number(None)
                each.is_agreed = False
        self._set_number(number)
        self.is_agreed = True


class DuplicateNames:
    """The optimizers of this process that are in use."""

    def __init__(self) -> None:
        self._claims: weakref.WeakKeyDictionary[object, Claim] = weakref.WeakKeyDictionary()
        self._count = 0

    def add(self, optimizer: object, member: OptimizerEntry) -> Claim:
        """Register ``optimizer`` until it is not in use any more; ``member`` must not refer to it."""
        self._count += 1
        claim = self._claims[optimizer] = Claim(self, member)
        return claim

    def remove(self, optimizer: object) -> None:
        """``optimizer`` is not in use any more, although it may be alive."""
        self._claims.pop(optimizer, None)

    @property
    def state(self) -> tuple[int, int]:
        """Another value after each change."""
        return self._count, len(self._claims)

    def all(self) -> list[Claim]:
        """The claims of all optimizers."""
        return list(self._claims.values())

    def of(self, claim: Claim) -> list[Claim]:
        """The other optimizers of the same ranks that share a parameter name."""
        process_set, names = claim.member.process_set, claim.member.names()
        candidates = [each for each in self.all() if each is not claim and each.member.process_set is process_set]
        return [each for each in candidates if not names.isdisjoint(each.member.names())]

    def models(self, process_set: ProcessSet) -> list[Model]:
        """Those of the optimizers of ``process_set``."""
        return [each.member.model() for each in self.all() if each.member.process_set is process_set]

    def collect_garbage(self) -> None:
        """Let go of optimizers that are not in use any more."""
        if len(self._claims) > 1:
            gc.collect()


optimizers = DuplicateNames()
