"""Numbers that tell apart the optimizers of a process that call their parameters the same.

A generator and a discriminator may both have a parameter "weight", whose gradients must not meet under one name.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from collectives.engine.engine import Engine
from hvd_cluster import basics
from hvd_cluster.objects import allgather_object
from hvd_cluster.process_sets import ProcessSet

__all__ = ["Numbered", "Ordinals", "propose"]


class Numbered(Protocol):
    """An optimizer that gets a number."""

    def names_in_flight(self) -> set[str]:
        """The names of its gradients."""

    def process_set_in_flight(self) -> ProcessSet:
        """The ranks that combine its gradients."""


O = TypeVar("O", bound=Numbered)  # noqa: E741


@dataclass(frozen=True)
class _Ordinal:
    number: int
    engine: weakref.ref[Engine]


class Ordinals(Generic[O]):
    """The optimizers of this process, and the number of each, which is the same on all ranks.

    Ranks may have different optimizers: on some of them one that was replaced is still in use, and a new rank of an
    elastic job never had it. Therefore the ranks exchange numbers, once for each new optimizer and again in each new
    world. The optimizers that were made last correspond, because all ranks make them in the same order.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, O] = weakref.WeakValueDictionary()
        self._numbers = count()
        self._ordinals: weakref.WeakKeyDictionary[O, _Ordinal] = weakref.WeakKeyDictionary()
        # One for each process set, held during an exchange on it; a failure of the engine ends the exchange.
        self._locks: dict[int | None, threading.Lock] = {}

    def add(self, optimizer: O) -> None:
        """Take in ``optimizer``, as long as it is in use."""
        self._made[next(self._numbers)] = optimizer

    def all(self) -> list[O]:
        """The optimizers that are in use, in the order in which they were made."""
        return [optimizer for _, optimizer in sorted(self._made.items(), key=lambda item: item[0])]

    def get(self, optimizer: O) -> int | None:
        """The number of ``optimizer`` in the current world; None before :meth:`exchange`."""
        ordinal = self._ordinals.get(optimizer)
        return None if ordinal is None or ordinal.engine() is not basics.engine() else ordinal.number

    def collect_garbage(self) -> None:
        """Let go of optimizers that are not in use any more; otherwise they would count."""
        if len(self._made) > 1:
            gc.collect()

    def exchange(self, optimizer: O) -> int:
        """The number of ``optimizer``. A collective of its process set: each member calls this for each new optimizer.

        It numbers all optimizers of the process set that have no number yet. Raises HorovodInternalError.
        """
        process_set = optimizer.process_set_in_flight()
        with self._locks.setdefault(process_set.process_set_id, threading.Lock()):
            if self.get(optimizer) is None:
                self._number(process_set)
        return self._ordinals[optimizer].number

    def _number(self, process_set: ProcessSet) -> None:
        engine = weakref.ref(basics.engine())
        rivals = [each for each in self.all() if each.process_set_in_flight() is process_set]
        proposal = propose([(each.names_in_flight(), self.get(each)) for each in rivals])
        new = [each for each in rivals if self.get(each) is None]
        proposals = allgather_object(proposal[::-1], "optimizer.ordinals", process_set)
        for age, each in enumerate(reversed(new)):
            self._ordinals[each] = _Ordinal(max(theirs[age] for theirs in proposals if age < len(theirs)), engine)


def propose(optimizers: Sequence[tuple[set[str], int | None]]) -> list[int]:
    """Numbers for the optimizers that have none, given the names and the number of each, in the order of making.

    Each is above those of all rivals that have a number or are older. So the maxima over the ranks differ, too.
    """
    numbers = [number for _, number in optimizers]
    proposal = []
    for position, (names, number) in enumerate(optimizers):
        if number is None:
            rivals = [other for other, (theirs, _) in enumerate(optimizers) if not names.isdisjoint(theirs)]
            taken = [found for other in rivals if other != position and (found := numbers[other]) is not None]
            numbers[position] = max(taken, default=-1) + 1
            proposal.append(max(taken, default=-1) + 1)
    return proposal
