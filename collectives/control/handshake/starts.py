"""The place in the rendezvous where the ranks of a world find each other, also when they connect repeatedly."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["Starts"]


class Starts:
    """The number of the next start of each world, as far as this process knows.

    A static job connects again in the same world after ``shutdown()`` and ``init()``. Each start has a number and an
    entry of its own in the rendezvous store. Rank 0 takes the next number once it has published the address of a start.
    Every other rank looks for rank 0 from the first number on in which it has not connected yet, and goes on to the
    next one if the entry says that the start has failed, or nothing listens at the address any more. So a rank finds
    rank 0 even if it missed starts that failed. If rank 0 does not start again soon, the rank raises the reason of the
    failed start, once.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, int] = {}
        self._failed: dict[Hashable, int] = {}

    def next(self, world: Hashable) -> int:
        """The number to begin with in ``world``."""
        return self._next.get(world, 0)

    def passed(self, world: Hashable, number: int) -> None:
        """Start ``number`` of ``world`` was published (rank 0), or has led to a connection."""
        self._next[world] = number + 1

    def failed(self, world: Hashable, number: int) -> None:
        """This process raises an error because of start ``number`` of ``world``."""
        self._failed[world] = number

    def has_failed(self, world: Hashable, number: int) -> bool:
        """Whether this process has raised an error because of start ``number`` of ``world``, or of a later one."""
        return number <= self._failed.get(world, -1)
