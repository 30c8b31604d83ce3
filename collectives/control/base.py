"""The interface of the channels that carry control messages between rank 0 and the other ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable

__all__ = ["Channel"]


class Channel(ABC):
    """Ordered, reliable messages between rank 0 and every other rank.

    ``send`` and ``receive`` are called by one thread at a time (the one that drives the engine); ``peek``, ``poll`` and
    ``wake`` by any thread.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @property
    def has_unsent(self) -> bool:
        """Whether a :meth:`poll` or :meth:`receive` is needed to transmit everything that was sent."""
        return False

    def flush(self, timeout: float) -> None:
        """Transmit the unsent data that the peers accept within ``timeout`` seconds."""
        return

    @abstractmethod
    def watch(self, on_lost: Callable[[int], None]) -> None:
        """Call ``on_lost(rank)``, once per rank, on a thread of the channel's own, when a peer's connection ends.

        A later call replaces ``on_lost``. The new one is called at once, on the calling thread, for the ranks lost
        before.
        """

    @abstractmethod
    def send(self, rank: int, data: bytes) -> None:
        """Queue ``data`` for ``rank``, without waiting for it. A lost peer is reported by the watch, not here."""

    def send_to(self, ranks: Iterable[int], data: bytes) -> None:
        """Queue ``data`` for each of ``ranks``, as :meth:`send` does; once for all that share a connection.

        A message that may be the last one to several ranks must go this way: one of them may carry the messages of the
        others, and leave when it has its own.
        """
        for rank in ranks:
            self.send(rank, data)

    @property
    def relayed(self) -> Collection[int]:
        """The ranks whose messages another rank passes on, and that :meth:`send_directly` reaches without it."""
        return ()

    def send_directly(self, ranks: Iterable[int], data: bytes) -> None:
        """Queue ``data`` for each of ``ranks``, past a rank that passes messages on, and may be stopped.

        For rare messages: they may overtake others, and are sent once for each rank.
        """
        for rank in ranks:
            self.send(rank, data)

    def process(self, rank: int) -> int | None:
        """The id of the process of ``rank``, a peer of this one on this host; None if it is not known."""
        return None

    def skip_relays(self) -> None:
        """Let :meth:`close` not wait until relays have passed on the messages of this rank.

        For an end whose reason went past them, or to which they have not answered: their processes may be stopped.
        """
        return

    @abstractmethod
    def receive(self) -> list[tuple[int, bytes]]:
        """The messages that have arrived, as (sender, data); does not wait. Raises EngineError for invalid data.

        A message that a host sends for several of its ranks has the lowest of them as its sender.
        """

    @abstractmethod
    def peek(self) -> bool:
        """Whether a message has arrived; costs less than :meth:`receive`. A wake-up is not a message."""

    @abstractmethod
    def poll(self, timeout: float | None) -> None:
        """Wait until something may have arrived, :meth:`wake` is called, or ``timeout`` seconds (None: no limit)."""

    @abstractmethod
    def wake(self) -> None:
        """End a running :meth:`poll`, or the next one."""

    def disown(self) -> None:
        """In a forked child: release the inherited descriptors; the parent's connections stay as they are."""
        return

    @abstractmethod
    def close(self) -> None:
        """Deliver the sent messages, then disconnect; bounded in time. The watches of the peers fire. Idempotent."""
