"""Notes of a launcher in the store of a job: a rank has ended, so the ranks that wait for it in ``init()`` need not."""

from __future__ import annotations

import math
import time

import msgpack

from collectives.api import CollectiveTimeoutError, HorovodInternalError, PeerLostError, SettingsError, Store
from collectives.control.handshake.entries import Entries
from collectives.control.handshake.hello import Hello
from collectives.control.handshake.starts import Starts
from collectives.rendezvous.store import PrefixStore

__all__ = ["EndNotes", "EndWatch"]

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
