"""The tensors that some members have submitted, until all have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from collectives.api import Operation, Request
from collectives.planning.crossings import Crossing, Kind, Subject, crossings, differ, subject
from collectives.planning.joins import Joins
from collectives.planning.pending import Pending
from collectives.planning.process_sets import ProcessSets
from collectives.planning.rejections import Rejections
from collectives.planning.waiting import Waiting

__all__ = ["ONCE", "Submissions"]

Key = tuple[int, str]

JOIN = f"{Operation.JOIN.label}."
"""The names of joins, and of nothing else, begin with this."""
ONCE = frozenset({Operation.JOIN, Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET})
"""Operations that are never cached and need every member, joined or not."""


class Submissions:
    """``pending`` has each half-submitted tensor, by its key. A tensor does not wait for members that have joined."""

    def __init__(self, sets: ProcessSets, joins: Joins, rejections: Rejections) -> None:
        self.pending: dict[Key, Pending] = {}
        self._complete: dict[Key, Pending] = {}
        self._sets = sets
        self._joins = joins
        self._rejections = rejections

    @property
    def are_half_submitted(self) -> bool:
        """Whether there are any but joins, which are always pending."""
        return len(self.pending) > len(self._joins)

    def waiting(self) -> dict[Key, Waiting]:
        """For each tensor but joins: the ranks that have submitted it, and those that have not."""
        return {
            key: pending.waiting(self._excused(key, pending))
            for key, pending in self.pending.items()
            if pending.operation is not Operation.JOIN  # which waits for as long as the others have data
        }

    def crossings(self, before: float) -> list[Crossing]:
        """The calls that wait for each other, of those that were submitted ``before`` a time in monotonic seconds."""
        calls: dict[Subject, dict[Kind, dict[Key, Pending]]] = {}
        for key, pending in self.pending.items():
            first = pending.first
            if first is not None and pending.operation not in ONCE and pending.since <= before:
                about, kind = subject(first)
                calls.setdefault(about, {}).setdefault(kind, {})[key] = pending
        return crossings((about, self._waiting(kinds)) for about, kinds in calls.items() if differ(kinds))

    def _waiting(self, kinds: Mapping[Kind, Mapping[Key, Pending]]) -> dict[Kind, dict[Key, Waiting]]:
        return {
            kind: {key: pending.waiting(self._excused(key, pending)) for key, pending in tensors.items()}
            for kind, tensors in kinds.items()
        }

    def of_keys(self, keys: Iterable[Key], before: float) -> dict[Key, Waiting]:
        """Those of ``keys`` that are half-submitted, since ``before`` a time in monotonic seconds."""
        found = {key: pending for key in keys if (pending := self.pending.get(key)) and pending.since <= before}
        return {key: pending.waiting(self._excused(key, pending)) for key, pending in found.items()}

    @staticmethod
    def is_join(key: Key) -> bool:
        """Whether ``key`` is that of a join."""
        return key[1].startswith(JOIN)

    def stalled_joins(self, tensors: Iterable[Waiting]) -> dict[Key, Waiting]:
        """The joins that silent ranks are missing in. A rank that waits for one of ``tensors`` is not silent."""
        busy = {rank for tensor in tensors for rank in tensor.submitted}
        joins = ((key, pending) for key, pending in self.pending.items() if pending.operation is Operation.JOIN)
        stalled = {key: self._joins.stalled(pending.waiting(()), busy) for key, pending in joins}
        return {key: waiting for key, waiting in stalled.items() if waiting is not None}

    def _excused(self, key: Key, pending: Pending) -> Collection[int]:
        """The ranks that ``pending`` need not wait for."""
        return () if pending.operation in ONCE else self._joins.ranks(key[0])

    def open(self, request: Request, now: float) -> Pending:
        """The entry for ``request``, which a rank submits now."""
        pending = self.pending.get(request.key)
        if pending is None:
            members = self._sets.ranks(request.process_set)
            pending = self.pending[request.key] = Pending(members, request.operation, now)
            for rank, rejection in self._rejections.take(request.key).items():
                pending.reject(rank, rejection)
        return pending

    def withdraw(self, rank: int, key: Key) -> bool:
        """Forget that ``rank`` refused the join ``key``, which it now calls again; whether it had.

        The other ranks may train, and must not wait for it until all of them join. Other calls stay refused.
        """
        pending = self.pending.get(key)
        if not self.is_join(key):
            return False
        if pending is None:
            return self._rejections.withdraw(key, rank)
        found = pending.withdraw(rank)
        if found:
            self._complete.pop(key, None)
        return found

    def abandon(self, rank: int, key: Key) -> bool:
        """Forget that ``rank`` has submitted ``key``, which some members have not; whether it had."""
        pending = self.pending[key]
        if not pending.abandon(rank):
            return False
        self._complete.pop(key, None)
        if pending.count == len(pending.rejected):
            del self.pending[key]
            for other, rejection in pending.rejected.items():
                self._rejections.add(other, rejection)
        return True

    def look(self, key: Key, pending: Pending) -> None:
        """Note whether all members have submitted ``pending`` now."""
        if pending.count == len(pending.members) or (self._joins and pending.lacks_only(self._excused(key, pending))):
            self._complete[key] = pending

    def look_again(self, process_set: int) -> None:
        """One more rank has joined the set."""
        for key, pending in self.pending.items():
            if key[0] == process_set and pending.operation is not Operation.JOIN:
                self.look(key, pending)

    def take_complete(self) -> Iterator[tuple[Key, Pending]]:
        """Remove and return the tensors that all members have submitted; an earlier one may end a later one."""
        complete, self._complete = self._complete, {}
        for key, pending in complete.items():
            if self.pending.pop(key, None) is pending:  # not refused meanwhile
                yield key, pending

    def of_id(self, id: int) -> list[Key]:
        """The tensor that ranks submitted by ``id``, which may have been dropped since."""
        return [key for key, pending in self.pending.items() if pending.known and pending.known.response.id == id]
