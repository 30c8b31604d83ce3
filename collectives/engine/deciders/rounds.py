"""Rounds in which the ranks agree on a board, without the coordinator, and the trials that run in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from collectives.engine.deciders.base import Attempt, Trial
from collectives.engine.link import Link
from collectives.planning.board import Board
from collectives.planning.messages import Withdraw
from collectives.planning.schedules import Schedule
from collectives.planning.worker import Worker

__all__ = ["Rounds", "ScheduledTrial"]

LARGEST = 0xFFFFFFFF
"""The largest number that a board can compare; schedules with larger ones are negotiated."""
LATE_SECONDS = 0.25
"""A rank that has waited this long asks the ranks that have not reached the round to decline it."""


class Rounds:
    """Every rank does one of two things in each round: it attempts a schedule on the ``board``, or it declines.

    When all ranks attempt the same schedule, it runs. A round where not all do is the last, until all ranks
    :meth:`begin` again at one point of their order. ``on``: whether another round follows. All deciders of a rank share
    the rounds, and put numbers of their own :meth:`lane` on the board. The schedules are of tensors of ``worker``.
    """

    def __init__(self, board: Board | None, worker: Worker, link: Link) -> None:
        self.on = False
        self.worker = worker
        self.link = link
        self._board = board
        self._round = 0
        self._withdrawn = 0
        self._asked = 0
        self._ask_again = 0.0
        self._pause = LATE_SECONDS
        self._lanes = 0

    def lane(self) -> int:
        """The lane of one more decider. Every rank has the same deciders, which take their lanes in the same order."""
        self._lanes += 1
        return self._lanes - 1

    def begin(self, is_busy: bool) -> None:
        """Start the rounds, as the coordinator told all ranks; without a board, do nothing.

        A rank that ``is_busy`` with something else declines the first round: other ranks may wait in it.
        """
        self.on = self._board is not None
        if is_busy or self._round < self._withdrawn:
            self.decline()

    def attempt(
        self,
        lane: int,
        schedule: int,
        call: Callable[[], None],
        agreed: Callable[[], None],
        waiting: Callable[[int, list[int]], None],
    ) -> bool:
        """Run ``call`` if all ranks attempt ``schedule``, a number; otherwise the rounds end. Return whether they do.

        Until that is known, ``waiting`` is called repeatedly, with the round and the ranks that have not reached it. If
        all ranks attempt ``schedule``, ``agreed`` is called then.
        """
        board, round, number = self._board, self._round + 1, schedule * self._lanes + lane
        if board is None or not self.on or number > LARGEST:
            return False
        self._round = round
        self.on = board.attempt(number, call, lambda absent: waiting(round, absent), agreed)
        return self.on

    def decline(self) -> None:
        """End the rounds, if they are on: this rank has a message for the coordinator."""
        if self._board is not None and self.on:
            self._round += 1
            self._board.decline()
            self.on = False

    def ask_to_withdraw(self, round: int) -> None:
        """Let the ranks that have not reached ``round`` decline it, and those that have left it show that.

        This may be called all the time: it asks now and then, because an answer may not fit into a connection yet.
        """
        now = time.monotonic()
        if self._asked < round:
            self._asked, self._pause = round, LATE_SECONDS
        elif now < self._ask_again:
            return
        self._ask_again, self._pause = now + self._pause, 2 * self._pause
        self.link.tell_all(Withdraw(round))

    def withdraw(self, message: Withdraw) -> None:
        """Decline a round, if this rank has not reached it: other ranks have waited in it for long.

        The request may come before :meth:`begin`, from a rank that has already run the same batch of empty tensors.
        """
        self._withdrawn = max(self._withdrawn, message.round)
        if self._round < self._withdrawn:
            self.decline()
        elif self._board is not None:
            self._board.hurry()
            if self.link.reaches_all and self._round == message.round:  # the one that has left may be a third rank
                self.ask_to_withdraw(message.round)


class ScheduledTrial(Trial):
    """Attempts ``schedule``, of tensors that only this rank knows to be in flight, in the next round.

    ``lane`` is that of the decider.
    """

    def __init__(self, rounds: Rounds, lane: int, schedule: Schedule) -> None:
        self.first = rounds.worker.next_batch
        self.batches = schedule.batches
        self._rounds = rounds
        self._lane = lane
        self._schedule = schedule
        self._since: float | None = None
        self._attempt: Attempt | None = None

    def run(self, attempt: Attempt) -> bool:
        """See :class:`Trial`."""
        self._attempt = attempt
        rounds, schedule = self._rounds, self._schedule
        if not rounds.attempt(self._lane, schedule.number, attempt.run, attempt.started, self._wait):
            return False
        rounds.worker.finish_schedule(schedule)
        rounds.link.used(schedule)
        return True

    def _wait(self, round: int, absent: Sequence[int]) -> None:
        wanted = self._attempt is not None and self._attempt.meanwhile(absent)
        if wanted or self._is_late():
            self._rounds.ask_to_withdraw(round)

    def _is_late(self) -> bool:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now > self._since + LATE_SECONDS
