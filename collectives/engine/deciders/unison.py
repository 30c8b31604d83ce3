"""The decider that agrees with the host's other ranks in shared memory, while all submit the same tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence

from collectives.engine.deciders.base import Attempt, Decider, Trial
from collectives.engine.deciders.rounds import Rounds
from collectives.engine.link import Link
from collectives.planning.board import Board
from collectives.planning.messages import Withdraw
from collectives.planning.schedules import Schedule
from collectives.planning.worker import Batch, Worker

__all__ = ["Unison"]

LATE_SECONDS = 0.25
"""A rank that has waited this long asks the ranks that have not come to decline."""


class Unison(Decider):
    """Tries the tensors that this rank has in flight, if the ranks know a schedule of exactly these.

    A rank *attempts* the schedule on the ``board``. When all ranks attempt the same one, it runs, at the same point of
    all ranks' orders, because no rank has anything else in flight. A rank that has other news for the coordinator
    declines before it sends them. ``fallback``, which shares ``worker``, decides everything else. The handler of
    messages is :meth:`withdraw`.
    """

    def __init__(self, board: Board | None, worker: Worker, link: Link, fallback: Decider) -> None:
        super().__init__(worker)
        self.decided = fallback.decided
        self.rounds = Rounds(board)
        self._link = link
        self._fallback = fallback
        self._asked_of = 0

    def next(self) -> Trial | None:
        """See :class:`Decider`."""
        if self.rounds.on:
            schedule = self._worker.schedule()
            if schedule is not None:
                return _ScheduledTrial(self, schedule, self._worker.next_batch)
            if self._worker.has_news:
                self.rounds.decline()
        return self._fallback.next()

    def decline(self) -> None:
        """See :class:`Decider`."""
        self.rounds.decline()
        self._fallback.decline()

    def ran(self, batch: Batch) -> None:
        """See :class:`Decider`. Declines at once if a tensor is in flight: other ranks may wait in the round."""
        self._fallback.ran(batch)
        if batch.unison:
            self.rounds.begin()
            if self.decided or not self._worker.is_idle or self._link.is_changing:
                self.rounds.decline()

    def withdraw(self, message: Withdraw) -> None:
        """Other ranks wait in a round, and want to go on."""
        self.rounds.withdraw(message.round)

    def finish(self, schedule: Schedule) -> None:
        """``schedule`` has run on all ranks."""
        self._worker.finish_schedule(schedule)
        self._link.used(schedule)

    def ask_to_withdraw(self, round: int) -> None:
        """Let the ranks that have not come to ``round`` decline it."""
        if self._asked_of < round:
            self._asked_of = round
            self._link.tell_all(Withdraw(round))


class _ScheduledTrial(Trial):
    """All tensors that this rank has in flight; ``first`` is the number of the next batch."""

    def __init__(self, unison: Unison, schedule: Schedule, first: int) -> None:
        self.first = first
        self.batches = schedule.batches
        self._unison = unison
        self._schedule = schedule
        self._since: float | None = None
        self._attempt: Attempt | None = None

    def run(self, attempt: Attempt) -> bool:
        """See :class:`Trial`."""
        self._attempt = attempt
        rounds = self._unison.rounds
        if not rounds.attempt(self._schedule.number, attempt.run, attempt.started, self._wait):
            return False
        self._unison.finish(self._schedule)
        return True

    def _wait(self, round: int, absent: Sequence[int]) -> None:
        wanted = self._attempt is not None and self._attempt.meanwhile(absent)
        if wanted or self._is_late():
            self._unison.ask_to_withdraw(round)

    def _is_late(self) -> bool:
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now > self._since + LATE_SECONDS
