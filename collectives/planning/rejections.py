"""Calls that failed on some ranks because of their arguments, while no rank has submitted the tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from collectives.planning.messages import Rejection
from collectives.planning.waiting import Waiting

__all__ = ["Rejections"]

Key = tuple[int, str]


class Rejections:
    """For each such tensor, the ranks on which the call failed.

    A rank may wait to submit the tensor again, which it cannot do until all members have answered: a *retry*.
    """

    def __init__(self) -> None:
        self._by_key: dict[Key, dict[int, Rejection]] = {}
        self._retried: dict[Key, float] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether a rank waits to submit a tensor again."""
        return bool(self._retried)

    def add(self, rank: int, rejection: Rejection) -> None:
        """The call failed on ``rank``."""
        self._by_key.setdefault(rejection.key, {})[rank] = rejection

    def take(self, key: Key) -> dict[int, Rejection]:
        """Remove and return the rejections of the tensor, by rank."""
        self._retried.pop(key, None)
        return self._by_key.pop(key, {})

    def withdraw(self, key: Key, rank: int) -> bool:
        """Forget the rejection of ``rank``; whether there was one."""
        rejected = self._by_key.get(key, {})
        found = rejected.pop(rank, None) is not None
        if found and not rejected:
            self.take(key)
        return found

    def retry(self, key: Key, now: float) -> None:
        """A rank waits to submit the tensor again."""
        if key in self._by_key:
            self._retried.setdefault(key, now)

    def is_over(self, key: Key, members: Iterable[int], joined: Collection[int]) -> bool:
        """Whether no member can submit the tensor any more."""
        rejected = self._by_key.get(key)
        return rejected is not None and all(rank in rejected or rank in joined for rank in members)

    def of_set(self, process_set: int) -> list[Key]:
        """The tensors of the process set."""
        return [key for key in self._by_key if key[0] == process_set]

    def groups(self, key: Key) -> set[str]:
        """The groups in which ranks have rejected the tensor."""
        return {rejection.group for rejection in self._by_key[key].values() if rejection.group}

    def of_groups(self, process_set: int, groups: Collection[str]) -> list[Key]:
        """The tensors of these groups of the process set."""
        return [
            key
            for key, rejected in self._by_key.items()
            if key[0] == process_set and any(rejection.group in groups for rejection in rejected.values())
        ]

    def waiting(self, key: Key, since: float, members: Sequence[int], joined: Collection[int]) -> Waiting:
        """The members that have not made the call."""
        rejected = self._by_key[key]
        missing = tuple(rank for rank in members if rank not in rejected and rank not in joined)
        return Waiting(since, missing, tuple(sorted(rejected)))

    def retries(self) -> dict[Key, float]:
        """The tensors that a rank waits to submit again, and since when."""
        return dict(self._retried)

    def remove_set(self, process_set: int) -> None:
        """Drop the tensors of a process set that is removed."""
        for key in self.of_set(process_set):
            self.take(key)

    def all(self) -> dict[Key, dict[int, Rejection]]:
        """For each tensor, the rejections by rank."""
        return dict(self._by_key)

    def clear(self) -> None:
        """Drop all."""
        self._by_key.clear()
        self._retried.clear()
