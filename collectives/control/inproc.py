"""The channel among ranks that are threads of one process: for a world of one and for tests of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from collectives.control.base import Channel
from collectives.engine.latch import Latch

__all__ = ["InprocHub"]


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
        self._arrived = Latch()
        self._on_lost: Callable[[int], None] | None = None
        self._lost: list[int] = []
        self._closed = False

    def watch(self, on_lost: Callable[[int], None]) -> None:
        """See :class:`Channel`; the callback runs on the thread that closes the peer."""
        self._on_lost = on_lost
        for rank in list(self._lost):
            on_lost(rank)

    def send(self, rank: int, data: bytes) -> None:
        """See :class:`Channel`."""
        if not self._closed:
            self._hub.channel(rank)._deliver(self.rank, data)

    def _deliver(self, sender: int, data: bytes) -> None:
        self._inbox.append((sender, data))
        self._arrived.set()

    def receive(self) -> list[tuple[int, bytes]]:
        """See :class:`Channel`."""
        self._arrived.clear()
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def peek(self) -> bool:
        """See :class:`Channel`."""
        return bool(self._inbox)

    def poll(self, timeout: float | None) -> None:
        """See :class:`Channel`."""
        self._arrived.wait(timeout)

    def wake(self) -> None:
        """See :class:`Channel`."""
        self._arrived.set()

    def close(self) -> None:
        """See :class:`Channel`."""
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
