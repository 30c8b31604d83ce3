"""How a rank exchanges messages with the coordinator: over the channel or, on rank 0, within its process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

from collectives.api import EngineError
from collectives.control.base import Channel
from collectives.engine.lookout import Lookout
from collectives.events import EventStream, Heard, Received, Sent
from collectives.parameters import Parameters
from collectives.planning.agreement import name_ranks
from collectives.planning.coordinator import Coordinator
from collectives.planning.errors import pack
from collectives.planning.messages import Abort, Inquiry, Message, Status, Withdraw, decode, encode
from collectives.planning.outbox import Outgoing
from collectives.planning.schedules import Schedule

__all__ = ["COORDINATOR", "FLUSH_SECONDS", "Link", "LocalLink", "RemoteLink"]

COORDINATOR = 0
"""The rank that has the coordinator."""
FLUSH_SECONDS = 0.1


class Link(ABC):
    """A rank's link to the coordinator, over ``channel``, which reaches ``peers``. For one thread at a time.

    Messages between ranks are published on ``events``.
    """

    def __init__(self, channel: Channel, peers: Iterable[int], events: EventStream) -> None:
        self._channel = channel
        self._peers = tuple(peers)
        self._events = events

    @property
    def deadline(self) -> float | None:
        """When :meth:`hear` must be called even if no message arrives, in monotonic seconds; None: never."""
        return None

    @property
    def is_holding(self) -> bool:
        """Whether the coordinator is here, and holds back ready tensors."""
        return False

    @property
    def is_changing(self) -> bool:
        """Whether the coordinator is here, and has parameters that some ranks do not have yet."""
        return False

    @abstractmethod
    def tell(self, message: Message) -> None:
        """Send ``message`` to the coordinator."""

    @abstractmethod
    def hear(self) -> Iterator[Message]:
        """The messages that this rank must act on, in order; does not wait."""

    @abstractmethod
    def unanswered(self) -> str:
        """The ranks that this rank waits for in a polite end, for a message."""

    def tell_all(self, message: Message) -> None:
        """Send ``message`` to every rank that this one can reach: on rank 0 all, elsewhere rank 0."""
        self._send_to(self._peers, message)

    def _send_to(self, ranks: Sequence[int], message: Message) -> None:
        data = encode(message)
        self._channel.send_to(ranks, data)
        if self._events.active:
            self._publish_sent(message, ranks, data)

    def _publish_sent(self, message: Message, ranks: Sequence[int], data: bytes) -> None:
        self._events.publish(Sent(type(message).__name__, tuple(ranks), len(data), time.monotonic()))

    def _publish_received(self, message: Message, sender: int, data: bytes) -> None:
        self._events.publish(Received(type(message).__name__, sender, len(data), time.monotonic()))

    def arrivals(self) -> Iterator[tuple[int, Message]]:
        """The arrived messages, as (sender, message), for the end of the engine, when the coordinator does not act."""
        for sender, data in self._channel.receive():
            message = decode(data)
            if self._events.active:
                self._publish_received(message, sender, data)
            yield sender, message

    def settle(self, may_wait: Callable[[], bool]) -> None:
        """Send the messages that other ranks need before they can take part in a batch, as long as ``may_wait()``."""
        return

    def used(self, schedule: Schedule) -> None:
        """All ranks ran ``schedule`` without asking the coordinator."""
        return

    def want_rounds(self) -> None:
        """A decider wants rounds to begin; only the link of the coordinator's rank passes that on."""
        return

    def propose(self, parameters: Parameters) -> None:
        """Let ``parameters`` hold on all ranks; EngineError where the coordinator is not here."""
        raise EngineError(f"parameters {parameters} were proposed on a rank other than rank {COORDINATOR}")


class RemoteLink(Link):
    """The link of every rank but rank 0.

    :meth:`settle` does not wait: the coordinator may be in a backend already, where it takes no messages.
    """

    def __init__(self, channel: Channel, events: EventStream) -> None:
        super().__init__(channel, (COORDINATOR,), events)

    def tell(self, message: Message) -> None:
        """See :class:`Link`."""
        data = encode(message)
        self._channel.send(COORDINATOR, data)
        if self._events.active:
            self._publish_sent(message, (COORDINATOR,), data)

    def unanswered(self) -> str:
        """See :class:`Link`. Only the coordinator knows more."""
        return f"rank {COORDINATOR}, or a rank that it waits for,"

    def hear(self) -> Iterator[Message]:
        """See :class:`Link`."""
        for sender, data in self._channel.receive():
            message = decode(data)
            if self._events.active:
                self._publish_received(message, sender, data)
            yield message


class LocalLink(Link):
    """The link of rank 0, which has the ``coordinator``: forwards messages between it and the other ranks.

    ``lookout`` watches the tensors that wait in the coordinator.
    """

    def __init__(self, channel: Channel, coordinator: Coordinator, lookout: Lookout, events: EventStream) -> None:
        super().__init__(channel, range(1, channel.size), events)
        self._coordinator = coordinator
        self._lookout = lookout

    @property
    def deadline(self) -> float | None:
        """See :class:`Link`."""
        hold, look = self._coordinator.deadline, self._lookout.deadline
        return look if hold is None else hold if look is None else min(hold, look)

    @property
    def is_holding(self) -> bool:
        """See :class:`Link`."""
        return self._coordinator.deadline is not None

    @property
    def is_changing(self) -> bool:
        """See :class:`Link`."""
        return self._coordinator.is_changing

    def tell(self, message: Message) -> None:
        """See :class:`Link`."""
        self._receive(COORDINATOR, message)

    def _receive(self, sender: int, message: Message) -> None:
        now = time.monotonic()
        if self._events.active:
            for (process_set, name), ranks, cached in self._coordinator.submissions(sender, message):
                self._events.publish(Heard(name, process_set, ranks, cached, now))
        self._coordinator.receive(sender, message, now)

    def hear(self) -> Iterator[Message]:
        """See :class:`Link`."""
        for sender, message in self.arrivals():
            if isinstance(message, Abort | Withdraw):
                yield message
            elif isinstance(message, Inquiry):
                self._send_to((sender,), self._status())
            else:
                self._receive(sender, message)
        now = time.monotonic()
        fatal = self._lookout.look(self._coordinator, now)
        if fatal is not None:
            yield Abort(pack(fatal))
        for outgoing in self._coordinator.decide(now):
            yield from self._send(outgoing)

    def unanswered(self) -> str:
        """See :class:`Link`."""
        return name_ranks(self._coordinator.unanswered())

    def _status(self) -> Status:
        return Status(self._lookout.answer(self._coordinator, time.monotonic()))

    def _send(self, outgoing: Outgoing) -> Iterator[Message]:
        """Send to the other ranks, and yield the message if it is for this rank."""
        others = [rank for rank in outgoing.ranks if rank != COORDINATOR]
        if others:
            self._send_to(others, outgoing.message)
        if len(others) < len(outgoing.ranks):
            yield outgoing.message

    def settle(self, may_wait: Callable[[], bool]) -> None:
        """See :class:`Link`. The peers run all older batches, then read, so this ends."""
        while self._channel.has_unsent and may_wait():
            self._channel.flush(FLUSH_SECONDS)

    def used(self, schedule: Schedule) -> None:
        """See :class:`Link`."""
        self._coordinator.use(schedule)

    def want_rounds(self) -> None:
        """See :class:`Link`."""
        self._coordinator.want_rounds()

    def propose(self, parameters: Parameters) -> None:
        """See :class:`Link`."""
        self._coordinator.propose(parameters)
