"""The negotiation with the coordinator: this rank tells what it has submitted, and hears which batches run next."""

from __future__ import annotations

import time
from collections import deque

from collectives.controller.messages import Refuse, Run, Unknown
from collectives.controller.worker import Batch, Worker
from collectives.engine.bypass import Bypass
from collectives.engine.link import Link
from collectives.engine.runner import Runner


class Negotiation:
    """Sends the news of ``worker`` to the coordinator, and keeps the batches that it decides.

    ``batches`` are those that have not run on this rank yet, in order; ``since`` is when the first of them was decided,
    in seconds of ``time.monotonic()``. The coordinator also lets the rounds of the ``bypass`` begin, and this rank
    declines one before it sends news. ``runner`` learns of the batches that will run, and of the tensors that will not.
    The handlers of messages are :meth:`run`, :meth:`refuse` and :meth:`resend`.
    """

    def __init__(self, worker: Worker, link: Link, bypass: Bypass, runner: Runner) -> None:
        self.batches: deque[Batch] = deque()
        self.since = 0.0
        self._worker = worker
        self._link = link
        self._bypass = bypass
        self._runner = runner

    def report(self) -> None:
        """Send the news of this rank, if there is any."""
        ready = self._worker.outgoing()
        if ready is not None:
            self._bypass.decline()
            self._link.tell(ready)

    def ran(self, batch: Batch) -> None:
        """The decided ``batch`` has run on this rank."""
        if batch.begins_rounds:
            self._bypass.begin(bool(self.batches) or not self._worker.is_idle or self._link.is_changing)

    # Messages.

    def run(self, message: Run) -> None:
        """The coordinator decided these batches."""
        batches = self._worker.run(message)
        self._runner.announce(batches)
        if not self.batches:
            self.since = time.monotonic()
        self.batches.extend(batches)

    def refuse(self, message: Refuse) -> None:
        """The ranks disagree about a tensor."""
        self._runner.refuse(self._worker.refuse(message))

    def resend(self, message: Unknown) -> None:
        """The coordinator has dropped these ids."""
        self._worker.resend(message)
