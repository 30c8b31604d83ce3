"""The decider that agrees with the other ranks without the coordinator, while all submit the same tensors."""

from __future__ import annotations

from collectives.api import Request
from collectives.engine.deciders.base import Decider, Outer, Trial
from collectives.engine.deciders.rounds import Rounds, ScheduledTrial

__all__ = ["Unison"]


class Unison(Outer):
    """Tries the tensors that this rank has in flight, if the ranks know a schedule of exactly these.

    When all ranks attempt the same schedule, it runs, at the same point of all ranks' orders, because no rank has
    anything else in flight.
    """

    def __init__(self, rounds: Rounds, fallback: Decider) -> None:
        super().__init__(fallback)
        self.rounds = rounds
        self._lane = rounds.lane()

    def next(self) -> Trial | None:
        """See :class:`Decider`."""
        if self.rounds.on:
            schedule = self.worker.schedule()
            if schedule is not None:
                return ScheduledTrial(self.rounds, self._lane, schedule)
        return self.fallback.next()

    def repeat(self, request: Request) -> Trial | None:
        """See :class:`Decider`."""
        if self.rounds.on and not self.decided.batches:
            schedule = self.worker.repeat(request)
            if schedule is not None:
                return ScheduledTrial(self.rounds, self._lane, schedule)
        return None
