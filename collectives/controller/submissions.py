"""The tensors that some members have submitted, until all have; and calls that failed for their arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import is_

from collectives.api import Operation, Request
from collectives.controller.joins import Joins
from collectives.controller.kind_mismatch import CallKind, KindMismatch, Subject, differ, kind_mismatches, subject
from collectives.controller.messages import Rejection, Response
from collectives.controller.process_sets import ProcessSets
from collectives.controller.response_cache import Known, ResponseCache
from collectives.controller.waits import Waiting


@dataclass(slots=True)
class Senders:
    """The ranks that sent an id, those of a message together: a host costs one step, for any number of ranks.

    ``is_common``: tensors whose ids come together have one object, until something else happens to one of them, which
    ``has_parted`` then.
    """

    ranks: list[tuple[int, ...]] = field(default_factory=list)
    count: int = 0
    is_common: bool = False
    has_parted: bool = False

    def add(self, ranks: tuple[int, ...]) -> None:
        """``ranks`` sent it."""
        self.ranks.append(ranks)
        self.count += len(ranks)


@dataclass(slots=True)
class Pending:
    """``by_id`` has the ranks that sent only the id of ``known``, ``requests`` the whole requests of the others.

    ``rejected`` has the ranks on which the call failed.
    """

    members: tuple[int, ...]
    operation: Operation
    since: float
    known: Known | None = None
    by_id: Senders = field(default_factory=Senders)
    requests: dict[int, Request] = field(default_factory=dict)
    rejected: dict[int, Rejection] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many ranks have submitted or rejected it."""
        return self.by_id.count + len(self.requests) + len(self.rejected)

    def add_known(self, ranks: tuple[int, ...], known: Known) -> None:
        """``ranks`` submitted the same requests as the last time."""
        self._part()
        self.known = known
        self.by_id.add(ranks)

    def add(self, ranks: Sequence[int], request: Request) -> None:
        """Each of ``ranks`` submitted ``request``."""
        self._part()
        first = next(iter(self.requests.values()), None)
        is_again = first == request and not request.offer  # that of equal requests differs
        self.requests.update(dict.fromkeys(ranks, first if first is not None and is_again else request))

    def reject(self, rank: int, rejection: Rejection) -> None:
        """The call failed on ``rank``."""
        self._part()
        self.rejected[rank] = rejection

    def withdraw(self, rank: int) -> bool:
        """Forget the rejection of ``rank``; whether there was one."""
        return self.rejected.pop(rank, None) is not None

    def abandon(self, rank: int) -> bool:
        """Forget that ``rank`` has submitted it; whether it had."""
        if self.requests.pop(rank, None) is not None:
            return True
        self._part()
        before, self.by_id = self.by_id, Senders()
        for ranks in before.ranks:
            rest = tuple(each for each in ranks if each != rank)
            if rest:
                self.by_id.add(rest)
        return self.by_id.count < before.count

    def _part(self) -> None:
        """Give this tensor a list of senders of its own, before it changes."""
        if self.by_id.is_common:
            self.by_id.has_parted = True
            self.by_id = Senders([*self.by_id.ranks], self.by_id.count)

    @property
    def first(self) -> Request | None:
        """One of the requests; None where there is none."""
        known = None if self.known is None else self.known.response.request
        return next(iter(self.requests.values()), known)

    @property
    def group(self) -> str:
        """The group of the first request; empty where there is none."""
        first = self.first
        return first.group if first else ""

    def lacks_only(self, joined: Collection[int]) -> bool:
        """Whether all members have submitted, but for some of ``joined``."""
        if self.count + len(joined) < len(self.members):
            return False  # called once per rank: a look at all ranks each time would cost the square of their number
        submitted = self.answered()
        return all(rank in submitted or rank in joined for rank in self.members)

    @property
    def last(self) -> int:
        """The rank that submitted last, among those that sent the whole request."""
        return next(reversed(self.requests))

    def submitted(self) -> set[int]:
        """The ranks that have submitted."""
        return {*self.requests, *(rank for ranks in self.by_id.ranks for rank in ranks)}

    def answered(self) -> set[int]:
        """The ranks that have submitted or rejected it."""
        return {*self.submitted(), *self.rejected}

    def unchanged(self, cache: ResponseCache) -> Response | None:
        """The response of the last time, if it still holds: the same ranks sent the id, and it is still known."""
        known = self.known
        if (
            known is None
            or self.requests
            or self.rejected
            or len(known.requests) != self.count
            or known.response.id not in cache
        ):
            return None
        return known.response

    def all_requests(self) -> dict[int, Request]:
        """The request of each rank, by rank."""
        first = next(iter(self.requests.values()), None)
        is_full = len(self.requests) == len(self.members)
        if first is not None and is_full and all(map(is_, self.requests.values(), repeat(first))):
            return dict.fromkeys(self.members, first)
        requests = dict(self.requests)
        if self.known is not None:
            known = self.known.requests
            requests.update((rank, known[rank]) for ranks in self.by_id.ranks for rank in ranks)
        return dict(sorted(requests.items()))

    def waiting(self, joined: Collection[int]) -> Waiting:
        """The ranks that have submitted, and those of the others that have not joined."""
        answered = self.answered()
        missing = tuple(rank for rank in self.members if rank not in answered and rank not in joined)
        return Waiting(self.since, missing, tuple(sorted(self.submitted())))


Key = tuple[int, str]
Ids = tuple[int, ...]


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


JOIN = f"{Operation.JOIN.label}."
"""The names of joins, and of nothing else, begin with this."""
ONCE = frozenset({Operation.JOIN, Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET})
"""Operations that are never cached and need every member, joined or not."""


@dataclass(frozen=True, slots=True)
class IdBundle:
    """The tensors of a message with several ids, which other hosts send, too: each message costs one step."""

    keys: tuple[Key, ...]
    pending: tuple[Pending, ...]
    senders: Senders
    version: int

    def is_whole(self, pending: Mapping[Key, Pending], cache: ResponseCache) -> bool:
        """Whether nothing else has happened to any of the tensors, or to the ids in ``cache``."""
        has_changed = self.senders.has_parted or cache.version != self.version
        return not has_changed and all(map(is_, map(pending.get, self.keys), self.pending))


MOST_BUNDLES = 64
"""The most groups of ids at a time: hosts whose gradients become ready in other orders send others."""


class Submissions:
    """``pending`` has each half-submitted tensor, by its key. A tensor does not wait for members that have joined."""

    def __init__(self, sets: ProcessSets, joins: Joins, rejections: Rejections) -> None:
        self.pending: dict[Key, Pending] = {}
        self._complete: dict[Key, Pending] = {}
        self._bundles: dict[Ids, IdBundle] = {}
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

    def kind_mismatches(self, before: float) -> list[KindMismatch]:
        """The calls that wait for each other, of those that were submitted ``before`` a time in monotonic seconds."""
        calls: dict[Subject, dict[CallKind, dict[Key, Pending]]] = {}
        for key, pending in self.pending.items():
            first = pending.first
            if first is not None and pending.operation not in ONCE and pending.since <= before:
                about, kind = subject(first)
                calls.setdefault(about, {}).setdefault(kind, {})[key] = pending
        return kind_mismatches((about, self._waiting(kinds)) for about, kinds in calls.items() if differ(kinds))

    def _waiting(self, kinds: Mapping[CallKind, Mapping[Key, Pending]]) -> dict[CallKind, dict[Key, Waiting]]:
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

    def add_together(self, ids: Ids, ranks: tuple[int, ...], cache: ResponseCache) -> bool:
        """The ``ranks`` of a host sent ``ids``, as another host has done; False if that must be taken id by id."""
        bundle = self._bundles.get(ids)
        if bundle is None:
            return False
        if self._joins or not bundle.is_whole(self.pending, cache):
            del self._bundles[ids]
            return False
        bundle.senders.add(ranks)
        if bundle.senders.count == len(bundle.pending[0].members):
            del self._bundles[ids]
            self._complete.update(zip(bundle.keys, bundle.pending, strict=True))
        return True

    def expect_together(self, ids: Ids, ranks: tuple[int, ...], cache: ResponseCache) -> None:
        """``ranks`` have sent ``ids``, the first ones to do so: other hosts may send the same."""
        if len(ids) < 2:  # each small operation of a user comes here
            return
        known = [each for each in map(cache.get, ids) if each is not None and each.of_all]
        keys = tuple(each.response.request.key for each in known)
        pending = tuple(each for each in map(self.pending.get, keys) if each is not None)
        if self._joins or not (len(pending) == len(ids) and _are_alike(pending, ranks)):
            return
        senders = Senders([ranks], len(ranks), is_common=True)
        for each in pending:
            each.by_id = senders
        if len(self._bundles) >= MOST_BUNDLES:
            self._bundles.pop(next(iter(self._bundles)))
        self._bundles[ids] = IdBundle(keys, pending, senders, cache.version)

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


def _are_alike(pending: Sequence[Pending], ranks: tuple[int, ...]) -> bool:
    """Whether ``ranks`` alone have sent ids of all of them, whose members are the same, and which are of no group."""
    members = pending[0].members
    return all(
        each.by_id.ranks == [ranks] and each.members is members and not (each.requests or each.rejected or each.group)
        for each in pending
    )
