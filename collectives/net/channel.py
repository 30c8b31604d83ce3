"""The channels that carry control messages between rank 0 and the other ranks: the interface, and that of threads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping

from collectives.api import override


class SignalEvent:
    """Like ``threading.Event``, which can deadlock if a signal handler interrupts the thread that holds its lock."""

    def __init__(self) -> None:
        # Owned by the event, held for a few instructions; reentrant. Waits end with set() or their timeout.
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        """Whether :meth:`set` was called since the last :meth:`clear`."""
        return self._set

    def set(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        """Make later calls of :meth:`wait` block."""
        self._set = False

    def wait(self, timeout: float | None) -> None:
        """Return when the event is set, or after ``timeout`` seconds (None: no limit)."""
        with self._changed:
            if not self._set:
                self._changed.wait(timeout)


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

    @property
    def leaders(self) -> Mapping[int, int]:
        """The ranks that only another rank reaches, which passes all their messages on, and that rank."""
        return {}

    @property
    def silent_rank(self) -> int:
        """The rank to name where rank 0 does not answer the last message of :meth:`send_directly`."""
        return 0

    def send_directly(self, ranks: Iterable[int], data: bytes) -> None:
        """Queue ``data`` for each of ``ranks``, past a rank that passes messages on, and may be stopped.

        For rare messages: they may overtake others, and are sent once for each rank. Those for ``leaders`` go as usual.
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


class InprocHub:
    """Connects ``size`` ranks; ``hub.channel(rank)`` is the end of that rank."""

    def __init__(self, size: int) -> None:
        self._channels = [InprocChannel(rank, size, self) for rank in range(size)]

    def channel(self, rank: int) -> InprocChannel:
        """The end of ``rank``."""
        return self._channels[rank]


class InprocChannel(Channel):
    """One end of an :class:`InprocHub`."""

    def __init__(self, rank: int, size: int, hub: InprocHub) -> None:
        super().__init__(rank, size)
        self._hub = hub
        self._inbox: deque[tuple[int, bytes]] = deque()
        # Owned by this end; waits are bounded by poll's timeout and ended by wake().
        self._arrived = SignalEvent()
        self._on_lost: Callable[[int], None] | None = None
        self._lost: list[int] = []
        self._closed = False

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """The callback runs on the thread that closes the peer."""
        self._on_lost = on_lost
        for rank in list(self._lost):
            on_lost(rank)

    @override
    def send(self, rank: int, data: bytes) -> None:
        if not self._closed:
            self._hub.channel(rank)._deliver(self.rank, data)

    def _deliver(self, sender: int, data: bytes) -> None:
        self._inbox.append((sender, data))
        self._arrived.set()

    @override
    def receive(self) -> list[tuple[int, bytes]]:
        self._arrived.clear()
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    @override
    def peek(self) -> bool:
        return bool(self._inbox)

    @override
    def poll(self, timeout: float | None) -> None:
        self._arrived.wait(timeout)

    @override
    def wake(self) -> None:
        self._arrived.set()

    @override
    def close(self) -> None:
        if not self._closed:
            self._closed = True
            peers = range(1, self.size) if self.rank == 0 else (0,)
            for peer in peers:
                self._hub.channel(peer)._lose(self.rank)

    def _lose(self, rank: int) -> None:
        if not self._closed:
            self._lost.append(rank)
            if self._on_lost is not None:
                self._on_lost(rank)
