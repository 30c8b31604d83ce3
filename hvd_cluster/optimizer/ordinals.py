"""Numbers that tell apart the optimizers of a process that use the same parameter names.

A generator and a discriminator may both have a parameter "weight", whose gradients must not meet under one name.
"""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from itertools import count
from typing import Generic, Protocol, TypeVar

from collectives.engine.engine import Engine
from hvd_cluster import basics
from hvd_cluster.process_sets import ProcessSet

__all__ = ["Numbered", "Ordinals"]


class Numbered(Protocol):
    """An optimizer that gets a number."""

    def names_in_flight(self) -> set[str]:
        """The names of its gradients."""

    def process_set_in_flight(self) -> ProcessSet:
        """The ranks that combine its gradients."""


O = TypeVar("O", bound=Numbered)  # noqa: E741


@dataclass(frozen=True)
class _Entry:
    names: frozenset[str]
    process_set: ProcessSet
    number: int


class Ordinals(Generic[O]):
    """The optimizers of this process, and the number of each, which is the same on all ranks.

    All ranks make their optimizers in the same order, so their numbers agree without a message. An optimizer that was
    replaced still counts, whether or not it is in use: ranks may differ in that. A copy counts from its first use on,
    because one rank alone may make copies, such as checkpoints. In a new world the optimizers that are
    in use then are numbered afresh, because a new rank has never had the others.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakValueDictionary[int, O] = weakref.WeakValueDictionary()
        self._numbers = count()
        # Held for a moment, by threads that make or use optimizers.
        self._lock = threading.RLock()
        self._engine: weakref.ref[Engine] | None = None
        self._entries: list[_Entry] = []
        self._ordinals: weakref.WeakKeyDictionary[O, int] = weakref.WeakKeyDictionary()

    def add(self, optimizer: O) -> None:
        """Register ``optimizer``, as long as it is in use."""
        self._made[next(self._numbers)] = optimizer

    def all(self) -> list[O]:
        """The optimizers that are in use, in the order in which they were made."""
        return [optimizer for _, optimizer in sorted(self._made.items(), key=lambda item: item[0])]

    def get(self, optimizer: O) -> int:
        """The number of ``optimizer`` in the current world, from the first call on."""
        if self._engine is None or self._engine() is not basics.engine() or optimizer not in self._ordinals:
            with self._lock:
                self._follow_world()
                if optimizer not in self._ordinals:
                    self._number(optimizer)
        return self._ordinals[optimizer]

    def collect_garbage(self) -> None:
        """Let go of optimizers that are not in use any more."""
        if len(self._made) > 1:
            gc.collect()

    def _follow_world(self) -> None:
        engine = basics.engine()
        if self._engine is not None and self._engine() is engine:
            return
        gc.collect()  # an optimizer that is not in use any more must not count
        self._engine = weakref.ref(engine)
        numbered = [optimizer for optimizer in self.all() if optimizer in self._ordinals]
        self._entries.clear()
        self._ordinals.clear()
        for optimizer in numbered:
            self._number(optimizer)

    def _number(self, optimizer: O) -> None:
        names, process_set = frozenset(optimizer.names_in_flight()), optimizer.process_set_in_flight()
        rivals = [
            each for each in self._entries if each.process_set is process_set and not names.isdisjoint(each.names)
        ]
        number = max((rival.number for rival in rivals), default=-1) + 1
        self._entries.append(_Entry(names, process_set, number))
        self._ordinals[optimizer] = number
