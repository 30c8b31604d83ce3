"""Pure state machines that bring all ranks to one order: no socket, no clock, no thread.

``Coordinator`` lives on rank 0, ``Worker`` on every rank. Both are fed with messages and say what to send or to run.
"""

from collectives.negotiation.coordinator import Coordinator, Outgoing
from collectives.negotiation.unison import Unison
from collectives.negotiation.worker import Batch, Refusal, Worker

__all__ = ["Batch", "Coordinator", "Outgoing", "Refusal", "Unison", "Worker"]
