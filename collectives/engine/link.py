"""How a rank exchanges messages with the coordinator: over the channel or, on rank 0, within its process."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from collectives.api import Changes, EngineError, HorovodInternalError, override
from collectives.controller.errors import pack
from collectives.controller.messages import (
    COORDINATOR,
    Abort,
    Accusation,
    Inquiry,
    Locate,
    Message,
    Ping,
    Pong,
    RankStatus,
    Status,
    WaitReport,
    decode,
    encode,
)
from collectives.controller.schedules import Schedule
from collectives.controller.waits import ProcessState
from collectives.events import EventStream, Received, Sent
from collectives.net.channel import Channel
from collectives.stalls.stacks import states_of

FLUSH_SECONDS = 0.1


class Link(ABC):
    """A rank's link to the coordinator, over ``channel``, which reaches ``peers``. For one thread at a time.

    Messages between ranks are published on ``events``; ``sent`` and ``received`` count them. ``bypassed`` has the
    schedules that ran since the coordinator, which is here, has last decided: by number, how often, the last one last.
    It is None where the coordinator is not here.
    """

    def __init__(self, channel: Channel, peers: Iterable[int], events: EventStream) -> None:
        self._channel = channel
        self._peers = tuple(peers)
        self._events = events
        self._kept: list[tuple[int, Message]] = []
        self.sent = self.received = 0
        self.bypassed: dict[int, tuple[Schedule, int]] | None = None

    @property
    def deadline(self) -> float | None:
        """When :meth:`hear` must be called even if no message arrives, in monotonic seconds; None: never."""
        return None

    @property
    def is_holding(self) -> bool:
        """Whether :meth:`hear` may return something without a new message."""
        return self.has_kept

    @property
    def has_kept(self) -> bool:
        """Whether :meth:`attend` has kept messages."""
        return bool(self._kept)

    @property
    def reaches_all(self) -> bool:
        """Whether :meth:`tell_all` reaches all other ranks."""
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
    def attend(self) -> Iterator[Message]:
        """While this rank waits inside an operation: the messages about ranks that wait or end, as :meth:`hear`.

        The others are kept for :meth:`hear`.
        """

    @abstractmethod
    def inquire(self) -> bool:
        """Ask the coordinator why this rank waits; it answers by :class:`Status`, with what it learns.

        Returns whether the coordinator may be silent, and so whether the first answer is still to come.
        """

    @abstractmethod
    def accuse(self, error: HorovodInternalError) -> None:
        """An operation failed here because of other ranks. The coordinator soon sends an :class:`Abort`."""

    @abstractmethod
    def report_waits(self, report: WaitReport) -> None:
        """Tell the coordinator how long this rank waits for others. Changes nothing else."""

    @abstractmethod
    def answer(self, found: RankStatus) -> None:
        """Tell the coordinator where this rank stands."""

    def states(self, ranks: Iterable[int]) -> Mapping[int, ProcessState]:
        """The states of the processes of ``ranks``, of those that this rank reaches on its host."""
        return states_of(self._channel, ranks)

    @abstractmethod
    def unanswered(self) -> str:
        """The ranks that this rank waits for in a polite end, for a message."""

    def tell_all(self, message: Message) -> None:
        """Send ``message`` to every rank that this one can reach: on rank 0 all, elsewhere rank 0."""
        self._send_to(self._peers, message)

    def abort(self, error: HorovodInternalError) -> None:
        """End every rank that this one can reach with ``error``, also those whose relay is stopped."""
        message = Abort(pack(error))
        self.tell_all(message)
        self._send_directly([rank for rank in self._peers if rank in self._channel.relayed], message)
        self._channel.skip_relays()

    def pong(self, _: Ping) -> None:
        """The coordinator asks whether this rank runs."""
        self._send_directly((COORDINATOR,), Pong())

    def _send_directly(self, ranks: Sequence[int], message: Message) -> None:
        data = encode(message)
        self._channel.send_directly(ranks, data)
        self.sent += len(ranks)
        if Sent in self._events.wanted:
            self._publish_sent(message, ranks, data)

    def _send_to(self, ranks: Sequence[int], message: Message) -> None:
        data = encode(message)
        self._channel.send_to(ranks, data)
        self.sent += len(ranks)
        if Sent in self._events.wanted:
            self._publish_sent(message, ranks, data)

    def _publish_sent(self, message: Message, ranks: Sequence[int], data: bytes) -> None:
        self._events.publish(Sent(type(message).__name__, tuple(ranks), len(data), time.monotonic()))

    def _publish_received(self, message: Message, sender: int, data: bytes) -> None:
        self._events.publish(Received(type(message).__name__, sender, len(data), time.monotonic()))

    def arrivals(self) -> Iterator[tuple[int, Message]]:
        """The messages that have arrived now, as (sender, message)."""
        for sender, data in self._channel.receive():
            message = decode(data)
            self.received += 1
            if Received in self._events.wanted:
                self._publish_received(message, sender, data)
            yield sender, message

    def settle(self, may_wait: Callable[[], bool]) -> None:
        """Send the messages that other ranks need before they can take part in a batch, as long as ``may_wait()``.

        It is called while a rank does not read them, and does what else may not wait.
        """
        return

    def propose(self, changes: Changes) -> None:
        """Let ``changes`` to the parameters hold on all ranks; EngineError where the coordinator is not here."""
        raise EngineError(f"parameters {changes} were proposed on a rank other than rank {COORDINATOR}")


class RemoteLink(Link):
    """The link of every rank but rank 0.

    :meth:`settle` does not wait: the coordinator may be in a backend already, where it takes no messages.
    """

    def __init__(self, channel: Channel, events: EventStream) -> None:
        super().__init__(channel, (COORDINATOR,), events)

    @override
    def tell(self, message: Message) -> None:
        data = encode(message)
        self._channel.send(COORDINATOR, data)
        self.sent += 1
        if Sent in self._events.wanted:
            self._publish_sent(message, (COORDINATOR,), data)

    @override
    def unanswered(self) -> str:
        """Only the coordinator knows more."""
        return f"rank {COORDINATOR}, or a rank that it waits for,"

    @override
    def hear(self) -> Iterator[Message]:
        if self._kept:
            yield from self._release()
        for sender, data in self._channel.receive():
            message = decode(data)
            self.received += 1
            if Received in self._events.wanted:
                self._publish_received(message, sender, data)
            yield message

    def _release(self) -> list[Message]:
        kept, self._kept = self._kept, []
        return [message for _, message in kept]

    @override
    def attend(self) -> Iterator[Message]:
        for sender, message in self.arrivals():
            if isinstance(message, Abort | Status | Ping | Locate):
                yield message
            else:
                self._kept.append((sender, message))

    @override
    def inquire(self) -> bool:
        self._send_directly((COORDINATOR,), Inquiry())
        return True

    @override
    def accuse(self, error: HorovodInternalError) -> None:
        self._send_directly((COORDINATOR,), Accusation(pack(error)))

    @override
    def report_waits(self, report: WaitReport) -> None:
        self._send_directly((COORDINATOR,), report)

    @override
    def answer(self, found: RankStatus) -> None:
        self._send_directly((COORDINATOR,), found)
