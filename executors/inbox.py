"""Messages of the workers of a job to its driver: values in the rendezvous store of the job."""

from __future__ import annotations

from collectives.rendezvous.store import MemoryStore

__all__ = ["Inbox"]

REMEMBERED_KEYS = 1 << 14


class Inbox:
    """Takes each value out of ``store`` once, though its worker sends it again after a connection that broke.

    It remembers the last keys only, because a worker sends again within seconds.
    """

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._taken: dict[str, None] = {}  # the oldest key is the first one

    def take(self, key: str) -> bytes | None:
        """The value of ``key``, which is removed from the store; None if it was taken before."""
        value = self._store.peek(key)
        self._store.delete(key)
        if value is None or key in self._taken:
            return None
        self._remember(key)
        return value

    def _remember(self, key: str) -> None:
        self._taken[key] = None
        if len(self._taken) > REMEMBERED_KEYS:
            del self._taken[next(iter(self._taken))]
