"""The entries of rank 0 in the rendezvous store: where it listens in each start, or why it cannot."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, Store
from collectives.control.handshake.hello import Hello, pack_answer, unpack_answer
from collectives.control.handshake.starts import Starts

__all__ = ["CURRENT", "Entries"]

CURRENT = "current"
"""The key of the round in which rank 0 listens, or listened last, and of its entry."""


class Entries:
    """Those for the world of ``hello`` in ``store``. ``starts`` holds what this process knows about earlier starts."""

    def __init__(self, hello: Hello, store: Store, starts: Starts) -> None:
        self._hello = hello
        self._store = store
        self._starts = starts
        self._world = hello.job, hello.round

    @property
    def next(self) -> int:
        """The number of the start to begin with."""
        return self._starts.next(self._world)

    def passed(self, start: int) -> None:
        """This start was published (rank 0), or has led to a connection."""
        self._starts.passed(self._world, start)

    def _key(self, start: int) -> str:
        return f"round-{self._hello.round}/start-{start}/rank-0"

    # Rank 0.

    def publish(self, start: int, entry: Any) -> None:
        """Rank 0 listens at ``entry``."""
        self._store.set(self._key(start), msgpack.packb(entry))
        self.passed(start)
        self._store.set(CURRENT, msgpack.packb((self._hello.round, entry)))

    def publish_error(self, start: int, reason: BaseException) -> None:
        """Rank 0 cannot connect: a rank that cannot be admitted can still read the reason."""
        with suppress(OSError, HorovodInternalError):
            self._store.set(self._key(start), msgpack.packb({"error": pack_answer(None, reason)}))
            self.passed(start)

    # The other ranks.

    def get(self, start: int, seconds: float) -> Any:
        """The entry of a start; raises the error that rank 0 published instead, or CollectiveTimeoutError."""
        entry = msgpack.unpackb(self._store.get(self._key(start), seconds))
        if "error" in entry:
            self.passed(start)
            unpack_answer(entry["error"])
        return entry

    def check(self, start: int) -> None:
        """Raise the error that rank 0 has published since, if any."""
        with suppress(CollectiveTimeoutError, PeerLostError):
            self.get(start, 0.0)

    def current(self) -> tuple[int, Any]:
        """The round in which rank 0 listens, or listened last, and its entry; this rank's round if none is known."""
        try:
            round, entry = msgpack.unpackb(self._store.get(CURRENT, 0.0))
            return round, entry
        except CollectiveTimeoutError:
            return self._hello.round, None
