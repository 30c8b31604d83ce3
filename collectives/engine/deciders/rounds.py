"""The rounds in which the ranks of a host agree or not, as counted on one rank."""

from __future__ import annotations

from collections.abc import Callable

from collectives.planning.board import Board

__all__ = ["Rounds"]

LARGEST = 0xFFFFFFFF
"""The largest number that a board can compare; schedules with larger ones are negotiated."""


class Rounds:
    """Every rank does one of two things in each round: it attempts a schedule on the ``board``, or it declines.

    When all ranks attempt the same schedule, it runs. A round where not all do is the last, until all ranks
    :meth:`begin` again at one point of their order. ``on``: whether another round follows.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._round = 0
        self._withdrawn = 0
        self.on = False

    def begin(self) -> None:
        """Start the rounds, as the coordinator told all ranks; without a board, do nothing."""
        self.on = self._board is not None
        if self._round < self._withdrawn:
            self.decline()

    def attempt(
        self,
        schedule: int,
        call: Callable[[], None],
        agreed: Callable[[], None],
        waiting: Callable[[int, list[int]], None],
    ) -> bool:
        """Run ``call`` if all ranks attempt ``schedule``, a number; otherwise the unison ends. Return whether they do.

        Until that is known, ``waiting`` is called repeatedly, with the round and the ranks that have not come. If all
        ranks attempt ``schedule``, ``agreed`` is called then.
        """
        board, round = self._board, self._round + 1
        if board is None or not self.on or schedule > LARGEST:
            return False
        self._round = round
        self.on = board.attempt(schedule, call, lambda absent: waiting(round, absent), agreed)
        return self.on

    def decline(self) -> None:
        """End the unison, if it is on: this rank has a message for the coordinator."""
        if self._board is not None and self.on:
            self._round += 1
            self._board.decline()
            self.on = False

    def withdraw(self, round: int) -> None:
        """Decline ``round``, if this rank has not reached it: others have waited in it for long.

        The request may come before :meth:`begin`, from a rank that has already run the same batch of empty tensors.
        """
        self._withdrawn = round
        if self._round < round:
            self.decline()
