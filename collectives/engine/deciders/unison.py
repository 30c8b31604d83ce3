"""The decider that agrees with the host's other ranks in shared memory, while all submit the same, one by one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from collectives.api import HOST
from collectives.engine.deciders.base import Attempt, Decider, Trial
from collectives.engine.deciders.rounds import Rounds
from collectives.engine.link import Link
from collectives.planning.board import Board
from collectives.planning.messages import Response, Withdraw
from collectives.planning.worker import Batch, Worker

__all__ = ["Unison"]

LATE_SECONDS = 0.25
"""A rank that has waited this long asks the ranks that have not come to decline."""


class Unison(Decider):
    """Tries the tensor that this rank has in flight, if it is a single one that the ranks know by its id.

    A rank *attempts* it on the ``board``. When all ranks attempt the same, it runs, at the same point of all ranks'
    orders, because no rank has anything else in flight. A rank that has other news for the coordinator declines before
    it sends them. ``fallback``, which shares ``worker``, decides everything else. The handler of messages is
    :meth:`withdraw`.
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
            lone = self._worker.lone()
            if lone is not None and lone.request.device == HOST:
                return _LoneTrial(self, lone, self._worker.next_batch)
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

    def finish(self, response: Response) -> None:
        """``response`` has run on all ranks."""
        self._worker.finish_lone(response)
        self._link.used(response.id)

    def ask_to_withdraw(self, round: int) -> None:
        """Let the ranks that have not come to ``round`` decline it."""
        if self._asked_of < round:
            self._asked_of = round
            self._link.tell_all(Withdraw(round))


class _LoneTrial(Trial):
    """One tensor that this rank has in flight, alone."""

    def __init__(self, unison: Unison, response: Response, number: int) -> None:
        self.first = number
        self.batches = ((response,),)
        self._unison = unison
        self._response = response
        self._since: float | None = None
        self._attempt: Attempt | None = None

    def run(self, attempt: Attempt) -> bool:
        """See :class:`Trial`."""
        self._attempt = attempt
        rounds = self._unison.rounds
        if not rounds.attempt(self._response.id, attempt.run, attempt.started, self._wait):
            return False
        self._unison.finish(self._response)
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
