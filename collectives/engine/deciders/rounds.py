"""The rounds in which the ranks of a host agree, or do not, as one of them counts them."""

from __future__ import annotations

from collections.abc import Callable

from collectives.planning.board import Board

__all__ = ["Rounds"]

LARGEST = 0xFFFFFFFF
"""What a board can compare; later ids are negotiated."""


class Rounds:
    """Every rank does one of two things in each round: it attempts an id on the ``board``, or it declines.

    When all ranks attempt the same id, it runs. A round where not all do is the last, until all ranks :meth:`begin`
    again at one point of their order. ``on`` says whether a round is to come.
    """

    def __init__(self, board: Board | None) -> None:
        self._board = board
        self._round = 0
        self._withdrawn = 0
        self.on = False

    def begin(self) -> None:
        """The coordinator has said so, to all ranks; to ranks without a board it means nothing."""
        self.on = self._board is not None
        if self._round < self._withdrawn:
            self.decline()

    def attempt(
        self,
        id: int,
        call: Callable[[], None],
        agreed: Callable[[], None],
        waiting: Callable[[int, list[int]], None],
    ) -> bool:
        """Run ``call`` if all ranks attempt ``id``; whether they do, or else the unison ends.

        ``waiting`` is called again and again until that is known, with the round and the ranks that have not come;
        ``agreed`` then, if they do.
        """
        board, round = self._board, self._round + 1
        if board is None or not self.on or id > LARGEST:
            return False
        self._round = round
        self.on = board.attempt(id, call, lambda absent: waiting(round, absent), agreed)
        return self.on

    def decline(self) -> None:
        """End it, if it is on: this rank has something to say to the coordinator."""
        if self._board is not None and self.on:
            self._round += 1
            self._board.decline()
            self.on = False

    def withdraw(self, round: int) -> None:
        """Decline ``round``, if this rank has not come to it: others have waited in it for long.

        It may be told before it has begun, by a rank that has run the same batch, of empty tensors, already.
        """
        self._withdrawn = round
        if self._round < round:
            self.decline()
