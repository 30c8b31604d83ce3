"""The decider that asks the coordinator on rank 0, by messages. It decides everything, so it needs no fallback."""

from __future__ import annotations

from collections.abc import Callable

from collectives.api import Request
from collectives.engine.deciders.base import Decided, Decider
from collectives.engine.link import Link
from collectives.planning.messages import Refuse, Run, Unknown
from collectives.planning.worker import Batch, Refusal, Worker

__all__ = ["Negotiated"]


class Negotiated(Decider):
    """Tells the coordinator what ``worker`` has new, and decides what it answers.

    ``refuse`` is called with each tensor that the ranks disagree about. The handlers of messages are :meth:`run`,
    :meth:`refuse` and :meth:`resend`.
    """

    def __init__(self, worker: Worker, link: Link, refuse: Callable[[Refusal], None]) -> None:
        self.decided = Decided()
        self._worker = worker
        self._link = link
        self._refuse = refuse

    def submit(self, request: Request, urgent: bool) -> None:
        """See :class:`Decider`."""
        self._worker.submit(request, urgent)

    def reject(self, request: Request, reason: str) -> None:
        """See :class:`Decider`."""
        self._worker.reject(request, reason)

    def urge(self, key: tuple[int, str]) -> None:
        """See :class:`Decider`."""
        self._worker.urge(key)

    def next(self) -> None:
        """See :class:`Decider`."""
        ready = self._worker.outgoing()
        if ready is not None:
            self._link.tell(ready)

    def decline(self) -> None:
        """See :class:`Decider`."""

    def ran(self, batch: Batch) -> None:
        """See :class:`Decider`."""

    # Messages.

    def run(self, message: Run) -> None:
        """The coordinator decided these batches."""
        self.decided.add(self._worker.run(message))

    def refuse(self, message: Refuse) -> None:
        """The ranks disagree about a tensor."""
        self._refuse(self._worker.refuse(message))

    def resend(self, message: Unknown) -> None:
        """The coordinator has dropped these ids."""
        self._worker.resend(message)
