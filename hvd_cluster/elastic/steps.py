"""Steps of optimizers: what happened to a state since its last commit, and which commits need a full copy.

Parameters and the state of optimizers change in steps, after all gradients have arrived. A loss shows in collectives
only. So if no collective runs between the first step of a cycle and its commit, a rank that hears of a loss has either
not touched its state since the last commit, or committed. Then no copy of the parameters is needed to go back.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_cluster.elastic.snapshots import Snapshots

LONGEST_INTERVAL = 1 << 16
"""The largest number of commits between two full copies."""
COST = 0.01
"""The part of the time that copies may take which are made in case a cycle turns out to be unusual."""


@dataclass(frozen=True)
class Marks:
    """Numbers that grow: the ``batches`` of collectives that this rank knows of, and the ``versions`` of its tensors.

    The versions move with changes by hand, but not with every step: fused optimizers do not move them.
    """

    batches: int
    versions: int


@dataclass(frozen=True)
class Cycle:
    """The time since a commit, which was at ``start``; ``first`` are the marks before the first step in it."""

    start: Marks
    first: Marks | None = None

    def step_began(self, now: Marks) -> Cycle:
        """An optimizer is about to change parameters."""
        return self if self.first is not None else replace(self, first=now)

    def is_untouched(self, now: Marks) -> bool:
        """Whether parameters and the state of optimizers are those of the commit."""
        return self.first is None and now.versions == self.start.versions

    def is_safe(self, now: Marks) -> bool:
        """Whether no collective ran while the state was touched, so that a loss cannot have found it so."""
        return self.is_untouched(now) or now.batches == self._touched.batches

    def without_batches(self) -> Cycle:
        """The same cycle where numbers of batches have begun again: those before tell nothing."""
        first = None if self.first is None else replace(self.first, batches=-1)
        return Cycle(replace(self.start, batches=-1), first)

    @property
    def _touched(self) -> Marks:
        """At the latest, if it was touched at all: after a change by hand it is not known when that was."""
        return self.first if self.first is not None and self.first.versions == self.start.versions else self.start


def interval(copy_seconds: float, cycle_seconds: float) -> int:
    """The number of commits between two copies that cost a small part of the time: a power of two.

    So ranks that measure slightly different times still copy at the same commits, and wait for each other once.
    """
    wanted, found = copy_seconds / COST, 1
    while found < LONGEST_INTERVAL and found * cycle_seconds < wanted:
        found *= 2
    return found


def needs_copy(commit: int, copy: int | None, is_safe: bool, copy_seconds: float, cycle_seconds: float) -> bool:
    """Whether the commit with the number ``commit`` makes a full copy; ``copy`` is the commit of the last one.

    ``is_safe``: that of the cycle that it ends, because the next one is probably like it. ``copy_seconds`` and
    ``cycle_seconds``: how long a copy and a cycle take.
    """
    return copy is None or not is_safe or commit % interval(copy_seconds, cycle_seconds) == 0


class Watchers:
    """The snapshots of states, as long as they live. The garbage collector may find one while they are told."""

    def __init__(self) -> None:
        self._snapshots: tuple[weakref.ref[Snapshots], ...] = ()
        self._lock = threading.Lock()  # Owner: the thread that adds snapshots, for a few instructions.

    def add(self, snapshots: Snapshots) -> None:
        """Tell ``snapshots`` of steps from now on."""
        with self._lock:
            alive = [reference for reference in self._snapshots if reference() is not None]
            self._snapshots = (*alive, weakref.ref(snapshots))

    def step_began(self, in_graph: bool = False) -> None:
        """An optimizer is about to change parameters; its gradients are combined. See :meth:`Snapshots.step_began`."""
        for reference in self._snapshots:
            snapshots = reference()
            if snapshots is not None:
                snapshots.step_began(in_graph)


watchers = Watchers()
"""Those of this process, for the optimizers of all frameworks. They load nothing else of elastic jobs."""
