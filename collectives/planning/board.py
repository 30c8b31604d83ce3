"""How the members of a group agree without a coordinator: in shared memory, or by the messages of an operation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

__all__ = ["MOST_VOTERS", "Board", "OffersBoard"]

MOST_VOTERS = 64
"""The members of a board over a network: each may send its vote to all others, which is too much for many. In a
hierarchy also those of a host, which may vote over the network as well."""


class Board(ABC):
    """The members decide, round by round, whether to run an operation.

    Every member takes part in every round, once: it attempts an operation or declines. For one thread at a time.
    """

    @abstractmethod
    def attempt(
        self,
        value: int,
        call: Callable[[], None],
        waiting: Callable[[list[int]], None],
        agreed: Callable[[], None],
    ) -> bool:
        """Run ``call``, an operation on all members, if all members attempt ``value``; return whether they do.

        ``value`` has 32 bits and is not 0. ``agreed`` is called as soon as all members have attempted ``value``, at
        the latest before anything is written to a destination. A disagreement is known as soon as one member
        declines or attempts another value, even if others have not entered the round; then no destination has been
        written. Where one member counts the votes of others, it is known only once that one has entered the round or
        declined. Until either is known, ``waiting`` is called every few milliseconds with the positions of the members
        that have not entered the round. Where only the late hosts are known, the first member gets all of their
        members, and others may get none. After a round without an operation, nobody enters the next one before all
        have left this one. Errors of these calls and of the operation propagate.
        """

    @abstractmethod
    def decline(self) -> None:
        """Take part in the next round with nothing to run. Does not wait."""

    def hurry(self) -> None:
        """Another member has waited for long in a round that this one has left. Does not wait."""
        return


class OffersBoard(ABC):
    """Something that gives its members a board, such as a backend in shared memory. The board ends with it."""

    @abstractmethod
    def board(self) -> Board | None:
        """The board of these members; None, on all of them, if they have none."""
