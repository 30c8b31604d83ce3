"""The decider that asks the coordinator on rank 0, by messages. It decides everything, so it needs no fallback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from collectives.engine.deciders.base import Decided, Decider
from collectives.engine.deciders.rounds import Rounds
from collectives.engine.link import Link
from collectives.planning.messages import Refuse, Run, Unknown
from collectives.planning.worker import Batch, Refusal, Worker

__all__ = ["Negotiated"]


class Outcomes(Protocol):
    """The receiver of the coordinator's answers."""

    def announce(self, batches: Sequence[Batch]) -> None:
        """The batches will run."""

    def refuse(self, refusal: Refusal) -> None:
        """The tensor will not run."""


class Negotiated(Decider):
    """Sends the news of ``worker`` to the coordinator, and decides as it answers.

    The coordinator also lets the ``rounds`` of other deciders begin, and this rank declines one before it sends news.
    ``runner`` learns of the batches that will run, and of the tensors that will not. The handlers of messages are
    :meth:`run`, :meth:`refuse` and :meth:`resend`.
    """

    def __init__(self, worker: Worker, link: Link, rounds: Rounds, runner: Outcomes) -> None:
        super().__init__(worker, Decided())
        self._link = link
        self._rounds = rounds
        self._runner = runner

    def next(self) -> None:
        """See :class:`Decider`."""
        ready = self.worker.outgoing()
        if ready is not None:
            if self._rounds.on:
                self._rounds.decline()
            self._link.tell(ready)

    def decline(self) -> None:
        """See :class:`Decider`."""
        self._rounds.decline()

    def ran(self, batch: Batch) -> None:
        """See :class:`Decider`."""
        if batch.begins_rounds:
            self._rounds.begin(bool(self.decided) or not self.worker.is_idle or self._link.is_changing)

    # Messages.

    def run(self, message: Run) -> None:
        """The coordinator decided these batches."""
        batches = self.worker.run(message)
        self._runner.announce(batches)
        self.decided.add(batches)

    def refuse(self, message: Refuse) -> None:
        """The ranks disagree about a tensor."""
        self._runner.refuse(self.worker.refuse(message))

    def resend(self, message: Unknown) -> None:
        """The coordinator has dropped these ids."""
        self.worker.resend(message)
