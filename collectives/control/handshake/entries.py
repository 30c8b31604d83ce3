"""The entries of rank 0 in the rendezvous store: where it listens in each start, or why the start has failed."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError, Store
from collectives.control.handshake.hello import Hello, pack_answer, unpack_answer
from collectives.control.handshake.starts import Starts

__all__ = ["CURRENT", "Entries"]

CURRENT = "current"
"""The key of the round in which rank 0 listens, or listened last, and of its entry."""
FAILURE_SECONDS = 0.5
"""How long a rank waits for the store when it leaves the reason of a failed start there, in seconds."""


class Entries:
    """Those for the world of ``hello`` in ``store``. ``starts`` holds what this process knows about earlier starts."""

    def __init__(self, hello: Hello, store: Store, starts: Starts) -> None:
        self._hello = hello
        self._store = store
        self._starts = starts
        self._world = hello.job, hello.round
        self._has_failed = False

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
        current = msgpack.packb((self._hello.round, entry))
        self._store.set_all({self._key(start): msgpack.packb(entry), CURRENT: current})
        self.passed(start)

    def publish_error(self, start: int, reason: BaseException) -> None:
        """The start has failed: a rank that comes later, or cannot be admitted, can still read the first reason."""
        if self._has_failed:
            return
        self._has_failed = True
        with suppress(OSError, HorovodInternalError, SettingsError):
            self._put_error(start, reason)
            self.passed(start)

    def _put_error(self, start: int, reason: BaseException) -> None:
        self._store.set(self._key(start), msgpack.packb({"error": pack_answer(None, reason)}), FAILURE_SECONDS)

    # The launcher.

    def end(self, reason: PeerLostError) -> set[str]:
        """Rank 0 has ended: publish that as its next start, unless the last one has failed. Returns the key."""
        entry: Any = {}
        for start in itertools.count(self.next):
            try:
                entry = self._get(start, 0.0)
            except CollectiveTimeoutError:
                break
        if "error" in entry:
            return set()
        self._store.set(self._key(start), msgpack.packb({"error": pack_answer(None, reason)}))
        return {self._key(start)}

    # The other ranks.

    def get(self, start: int, seconds: float) -> Any:
        """The entry of a start, None if the start has failed. Raises CollectiveTimeoutError."""
        entry = self._get(start, seconds)
        return None if "error" in entry else entry

    def check(self, start: int) -> None:
        """Raise the reason why the start has failed, if a rank has left one and this process has not raised it yet."""
        try:
            entry = self._get(start, 0.0)
        except (CollectiveTimeoutError, PeerLostError):
            return
        if "error" in entry and not self._starts.has_failed(self._world, start):
            self.failed(start)
            unpack_answer(entry["error"])

    def leave_reason(self, start: int, reason: PeerLostError) -> None:
        """Rank 0 has ended without a reason: a rank that comes later hears that of this rank."""
        with suppress(OSError, HorovodInternalError):
            self._put_error(start, reason)

    def failed(self, start: int) -> None:
        """This process raises an error because of the start."""
        self._starts.failed(self._world, start)

    def _get(self, start: int, seconds: float) -> Any:
        return msgpack.unpackb(self._store.get(self._key(start), seconds))

    def current(self) -> tuple[int, Any]:
        """The round in which rank 0 listens, or listened last, and its entry; this rank's round if none is known."""
        try:
            round, entry = msgpack.unpackb(self._store.get(CURRENT, 0.0))
            return round, entry
        except CollectiveTimeoutError:
            return self._hello.round, None
