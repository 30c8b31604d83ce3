"""The entries in the store by which the ranks of a world find rank 0, or learn that a start has failed."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError, Store
from collectives.handshake.hello import Hello, pack_answer, unpack_answer
from collectives.store.memory import PrefixStore


class Starts:
    """The number of the next start of each world, as far as this process knows.

    A static job connects again in the same world after ``shutdown()`` and ``init()``. Each start has a number and an
    entry of its own in the rendezvous store. Rank 0 takes the next number once it has published the address of a start.
    Every other rank looks for rank 0 from the first number on in which it has not connected yet, and goes on to the
    next one if the entry says that the start has failed, or nothing listens at the address any more. So a rank finds
    rank 0 even if it missed starts that failed. If rank 0 does not start again soon, the rank raises the reason of the
    failed start, once.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, int] = {}
        self._failed: dict[Hashable, int] = {}

    def next(self, world: Hashable) -> int:
        """The number to begin with in ``world``."""
        return self._next.get(world, 0)

    def passed(self, world: Hashable, number: int) -> None:
        """Start ``number`` of ``world`` was published (rank 0), or has led to a connection."""
        self._next[world] = number + 1

    def failed(self, world: Hashable, number: int) -> None:
        """This process raises an error because of start ``number`` of ``world``."""
        self._failed[world] = number

    def has_failed(self, world: Hashable, number: int) -> bool:
        """Whether this process has raised an error because of start ``number`` of ``world``, or of a later one."""
        return number <= self._failed.get(world, -1)


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

    # The leader of a host in a large world.

    def publish_leader(self, center: str, entry: Any) -> None:
        """This rank leads those of its host to the listener ``center`` of rank 0, and listens at ``entry``."""
        self._store.set(self._leader_key(center), msgpack.packb(entry))

    def withdraw_leaders(self, center: str) -> None:
        """All ranks have come to the listener ``center`` of rank 0: nobody looks for a leader any more."""
        with suppress(OSError, HorovodInternalError, SettingsError):
            self._store.delete(f"{self._leaders(center)}/")

    def leader(self, center: str, seconds: float) -> Any:
        """The entry of the leader of this rank's host. Raises CollectiveTimeoutError."""
        return msgpack.unpackb(self._store.get(self._leader_key(center), seconds))

    def _leader_key(self, center: str) -> str:
        host = hashlib.sha256(self._hello.host.encode(errors="replace")).hexdigest()[:32]
        return f"{self._leaders(center)}/{host}"

    def _leaders(self, center: str) -> str:
        return f"round-{self._hello.round}/{center}/leaders"

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


KEY = "ended"
LOOK_SECONDS = 1.0
"""Rank 0 looks for a note this often while it waits for other ranks, so a start that is quicker makes no look."""


class EndNotes:
    """The launcher's side, for ``job``, which has one world. ``store`` is that of its rendezvous server.

    Both methods raise the errors of the store.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = PrefixStore(store, job)
        self._entries = Entries(Hello(0, 1, ""), self._store, Starts())
        self._keys: set[str] = set()

    def leave(self, rank: int, host: str, text: str) -> None:
        """``rank`` on ``host`` will not come any more; ``text`` says how it ended, such as "ended with exit code 0".

        Rank 0 waits for all others, and tells them; they wait for rank 0. The first note counts.
        """
        text = text.encode(errors="replace").decode()  # an exception may show anything
        if not rank:
            self._keys |= self._entries.end(_error(rank, host, text))
        elif KEY not in self._keys:
            self._store.set(KEY, msgpack.packb((rank, host, text)))
            self._keys.add(KEY)

    def withdraw(self) -> None:
        """Delete the notes: the ranks may start again."""
        while self._keys:
            self._store.delete(self._keys.pop())


class EndWatch:
    """The side of rank 0 while it waits for the others; ``store`` is that of its job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._due = time.monotonic() + LOOK_SECONDS

    def check(self) -> None:
        """Raise PeerLostError if there is a note. May be called as often as one likes."""
        if time.monotonic() < self._due:
            return
        note = self._look()
        if note:
            raise _error(*msgpack.unpackb(note))

    def _look(self) -> bytes:
        """Nothing if there is no note. A launcher that does not answer is asked no more: each try takes seconds."""
        self._due = math.inf
        try:
            note = self._store.get(KEY, 0.0)
        except CollectiveTimeoutError:
            note = b""
        except (HorovodInternalError, SettingsError):
            return b""
        self._due = time.monotonic() + LOOK_SECONDS
        return note


def _error(rank: int, host: str, text: str) -> PeerLostError:
    whole = f"rank {rank} on host {host} {text} and did not come to this hvd.init(); look at its output"
    return PeerLostError(whole, [rank], [host])
