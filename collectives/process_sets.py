"""Pure: the process sets of a job, ids -> ranks. Set 0 is the global one and always exists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from collectives.api import InvalidRequestError

__all__ = ["GLOBAL", "ProcessSets"]

GLOBAL = 0


class ProcessSets:
    """Ids 0, 1, 2... in the order of creation; the ranks of a set are sorted global ranks."""

    def __init__(self, size: int, sets: Iterable[Sequence[int]] = ()) -> None:
        self.size = size
        self._ranks: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}
        for ranks in sets:
            self.add(ranks)

    def add(self, ranks: Sequence[int]) -> int:
        """Register a set and return its id. InvalidRequestError for an unknown, repeated or duplicate member list."""
        members = tuple(sorted(ranks))
        wrong = [rank for rank in members if not 0 <= rank < self.size]
        if not members or wrong or len(set(members)) < len(members):
            raise InvalidRequestError(
                f"process set {list(ranks)} must name each rank once, out of 0..{self.size - 1}, and at least one"
            )
        if members in self._ranks.values():
            raise InvalidRequestError(f"a process set with the ranks {list(members)} exists already; use that one")
        id = next(number for number in range(len(self._ranks) + 1) if number not in self._ranks)
        self._ranks[id] = members
        return id

    def ranks(self, id: int) -> tuple[int, ...]:
        """The members of set ``id``; InvalidRequestError lists the known ids otherwise."""
        ranks = self._ranks.get(id)
        if ranks is None:
            raise InvalidRequestError(f"process set {id} does not exist; known ids: {sorted(self._ranks)}")
        return ranks

    def ids(self) -> list[int]:
        """All ids, ascending."""
        return sorted(self._ranks)
