"""Pure: the process sets of a job, ids -> ranks. Set 0 is the global one and always exists."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from operator import index

from collectives.api import InvalidRequestError

GLOBAL = 0


class ProcessSets:
    """Ids are 0, 1, 2... in the order of creation; those of removed sets are used again, in the order of removal.

    The ranks of a set are sorted global ranks.
    """

    def __init__(self, size: int, sets: Iterable[Sequence[int]] = ()) -> None:
        self.size = size
        self._ranks: dict[int, tuple[int, ...]] = {GLOBAL: tuple(range(size))}
        self._known = {*self._ranks.values()}
        self._free: deque[int] = deque()
        for ranks in sets:
            self.add(ranks)

    def add(self, ranks: Sequence[int]) -> int:
        """Register a set and return its id. InvalidRequestError for an unknown, repeated or duplicate member list."""
        members = self.check(ranks)
        id = self._free.popleft() if self._free else len(self._ranks)
        self._ranks[id] = members
        self._known.add(members)
        return id

    def check(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """``ranks`` as the members of a new set; InvalidRequestError when they cannot form one."""
        try:
            members = tuple(sorted(map(index, ranks)))
        except TypeError:
            raise InvalidRequestError(f"process set {ranks!r} must be a list of ranks, which are integers") from None
        wrong = [rank for rank in members if not 0 <= rank < self.size]
        if not members or wrong or len(set(members)) < len(members):
            raise InvalidRequestError(
                f"process set {list(ranks)} must name each rank once, out of 0..{self.size - 1}, and at least one"
            )
        if members in self._known:
            raise InvalidRequestError(f"a process set with the ranks {list(members)} exists already; use that one")
        return members

    def check_removable(self, id: int) -> tuple[int, tuple[int, ...]]:
        """``id`` as a plain integer, and the members; InvalidRequestError for the global set and for an unknown id."""
        if id == GLOBAL:
            raise InvalidRequestError("process set 0, all ranks, cannot be removed")
        return index(id), self.ranks(id)

    def remove(self, id: int) -> None:
        """Unregister a set; InvalidRequestError as :meth:`check_removable` raises it."""
        self.check_removable(id)
        self._known.discard(self._ranks.pop(id))
        self._free.append(id)

    def copy(self) -> ProcessSets:
        """An independent copy of the sets."""
        twin = ProcessSets(self.size)
        twin._ranks, twin._known, twin._free = dict(self._ranks), set(self._known), self._free.copy()
        return twin

    def __contains__(self, id: int) -> bool:
        return id in self._ranks

    def ranks(self, id: int) -> tuple[int, ...]:
        """The members of set ``id``; InvalidRequestError lists the known ids otherwise."""
        ranks = self._ranks.get(id)
        if ranks is None:
            raise InvalidRequestError(f"process set {id} does not exist; known ids: {sorted(self._ranks)}")
        return ranks

    def members(self, id: int) -> tuple[int, ...]:
        """The members of set ``id``; none if it does not exist."""
        return self._ranks.get(id, ())

    def ids(self) -> list[int]:
        """All ids, ascending."""
        return sorted(self._ranks)
