"""The coordinator's side of the negotiation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from collectives.api import EngineError, InvalidRequestError, Operation, Request
from collectives.parameters import Parameters
from collectives.planning.agreement import Disagreement, disagreement, explain_rejections, sizes
from collectives.planning.fusion import plan
from collectives.planning.groups import Groups, Member
from collectives.planning.messages import (
    Leave,
    Left,
    Message,
    Ready,
    Refuse,
    Rejection,
    Response,
    Run,
    Stop,
    Together,
    Unknown,
)
from collectives.planning.pending import Pending
from collectives.planning.process_sets import ProcessSets
from collectives.planning.response_cache import Known, ResponseCache, compact
from collectives.planning.schedules import Schedule, Schedules, alone
from collectives.planning.stalls import Waiting

__all__ = ["Coordinator", "Outgoing"]

Key = tuple[int, str]

ONCE = frozenset({Operation.JOIN, Operation.ADD_PROCESS_SET, Operation.REMOVE_PROCESS_SET})
"""Operations that are never cached and need every member, joined or not."""

REPETITIONS = 2
"""After this number of known schedules in a row, the next tensors will probably have a known one, too."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the ranks that must get it."""

    ranks: tuple[int, ...]
    message: Message


class Coordinator:
    """Collects what each rank has ready and decides what runs, in one order for all process sets.

    Feed it with :meth:`receive`, then ask :meth:`decide`. ``now`` is any monotonic time in seconds. Ready tensors are
    held for at most the cycle time of the ``parameters`` to fuse with others that are half-submitted, and not at all
    once a caller waits. Patient parameters hold them even if nothing is half-submitted: where ranks share their cores
    with the computation, moving data early only slows the computation down. ``isolate_groups`` is as in
    :func:`collectives.planning.fusion.plan`. ``process_sets`` is the coordinator's own copy: it changes before those of
    the ranks do.
    """

    def __init__(self, process_sets: ProcessSets, parameters: Parameters, isolate_groups: bool = False) -> None:
        self._sets = process_sets
        self._parameters = replace(parameters, version=1)
        self._outdated = set(range(process_sets.size))
        self._isolate_groups = isolate_groups
        self._cache = ResponseCache(parameters.cache_capacity)
        self._pending: dict[Key, Pending] = {}
        self._complete: dict[Key, Pending] = {}
        self._rejected: dict[Key, dict[int, Rejection]] = {}
        self._retried: dict[Key, float] = {}
        self._groups = Groups()
        self._joined: dict[int, set[int]] = {}
        self._asked: dict[int, Counter[int]] = {}
        self._early_joins: dict[int, list[Request]] = {}
        self._urgent: set[Key] = set()
        self._ready: list[Response] = []
        self._ready_bytes = 0
        self._flush = False
        self._held_since: float | None = None
        self._next_id = 0
        self._next_batch = 0
        self._new: dict[int, Response] = {}
        self._unsent: set[int] = set()
        self._forget: dict[int, list[int]] = {}
        self._outgoing: list[Outgoing] = []
        self._leaving: int | None = None
        self._left: set[int] = set()
        self._schedules = Schedules()
        self._repetitions = 0

    @property
    def deadline(self) -> float | None:
        """When :meth:`decide` must be called again, at the latest; None when only a message can change anything."""
        since = self._held_since  # read once: the communication thread asks while others drive
        return None if since is None else since + self._parameters.cycle_time

    @property
    def is_waiting(self) -> bool:
        """Whether some tensor is half-submitted."""
        return bool(self._pending or self._retried)

    def waiting(self) -> dict[Key, Waiting]:
        """For each half-submitted tensor: the ranks that have submitted it, and those that have not."""
        pending = {
            key: pending.waiting(self._excused(key, pending))
            for key, pending in self._pending.items()
            if pending.operation is not Operation.JOIN  # which waits for as long as the others have data
        }
        return pending | {key: self._waiting_retry(key, since) for key, since in self._retried.items()}

    def _waiting_retry(self, key: Key, since: float) -> Waiting:
        """A call that failed on some ranks and that no other rank has made; a failed rank waits to submit it again."""
        rejected, joined = self._rejected[key], self._joined.get(key[0], ())
        missing = tuple(rank for rank in self._sets.ranks(key[0]) if rank not in rejected and rank not in joined)
        return Waiting(since, missing, tuple(sorted(rejected)))

    def _excused(self, key: Key, pending: Pending) -> Collection[int]:
        """The ranks that ``pending`` need not wait for."""
        return () if pending.operation in ONCE else self._joined.get(key[0], ())

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Handle ``message`` from ``rank``."""
        if isinstance(message, Ready | Together):
            if self._leaving is None:
                self._take(rank, message, now)
        elif isinstance(message, Leave):
            self._leave(rank)
        elif isinstance(message, Left):
            self._left.add(rank)
            if len(self._left) == self._sets.size:
                self._outgoing.append(Outgoing(self._everybody(), Left()))
        else:
            raise EngineError(f"rank {rank} sent {message!r}, which only a coordinator may send")

    def submissions(self, sender: int, message: Message) -> Iterator[tuple[Key, tuple[int, ...], bool]]:
        """The tensors that ``message`` submits: each with its ranks, and whether it came as an id.

        For observers, before :meth:`receive`. An id that was dropped is left out: the whole request will follow.
        """
        if isinstance(message, Ready | Together):
            ranks = message.ranks if isinstance(message, Together) else (sender,)
            for id in message.ids:
                known = self._cache.get(id)
                if known is not None:
                    yield known.response.request.key, ranks, True
        if isinstance(message, Ready):
            for request in message.requests:
                yield request.key, (sender,), False

    def propose(self, parameters: Parameters) -> None:
        """Let ``parameters`` hold on all ranks, from the next batch on, under the next version."""
        parameters = replace(parameters, version=self._parameters.version)
        if parameters != self._parameters:
            self._parameters = replace(parameters, version=parameters.version + 1)
            self._outdated = set(range(self._sets.size))
            self._schedules.clear()
            self._drop(self._cache.resize(parameters.cache_capacity))

    @property
    def is_changing(self) -> bool:
        """Whether some ranks do not have the parameters yet."""
        return bool(self._outdated)

    def decide(self, now: float) -> list[Outgoing]:
        """The messages to send now, in order."""
        if self._ready and self._is_due(now):
            self._release()
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _is_due(self, now: float) -> bool:
        if self._flush or self._ready_bytes >= self._parameters.fusion_threshold:
            return True
        half_submitted = len(self._pending) - len(self._joined)  # a join is always pending
        if not (half_submitted or self._parameters.patient):
            return True
        return self.deadline is not None and now >= self.deadline

    def _everybody(self) -> tuple[int, ...]:
        return tuple(range(self._sets.size))

    def unanswered(self) -> tuple[int, ...]:
        """The ranks that have not left yet."""
        return tuple(rank for rank in range(self._sets.size) if rank not in self._left)

    def _leave(self, rank: int) -> None:
        if self._leaving is None:
            self._leaving = rank
            self._release()
            self._pending.clear()
            self._rejected.clear()
            self._retried.clear()
            self._outgoing.append(Outgoing(self._everybody(), Stop(rank)))

    # Messages from ranks.

    def _take(self, rank: int, message: Ready | Together, now: float) -> None:
        ranks = message.ranks if isinstance(message, Together) else (rank,)
        for id in message.ids:
            self._take_id(ranks, id, now)
        if isinstance(message, Ready):
            for request in message.requests:
                self._take_request(rank, request, now)
            for rejection in message.rejected:
                self._take_rejection(rank, rejection)
            if message.answered:
                self._hear_answers(rank, message.answered, now)
            for key in message.urgent:
                self._urge(key)
                self._note_retry(key, now)
        for id in message.urgent_ids:
            self._urge_id(id)
        # Only now: a group may fail, and then all its tensors must be here.
        complete, self._complete = self._complete, {}
        for key, pending in complete.items():
            if self._pending.pop(key, None) is pending:  # not refused meanwhile
                self._agree(key, pending, now)

    def _take_id(self, ranks: tuple[int, ...], id: int, now: float) -> None:
        known = self._cache.get(id)
        if known is None or not (known.of_all or known.requests.keys() >= set(ranks)):
            self._ask(ranks, id)
            return
        request = known.response.request
        if request.group:
            ranks = tuple(rank for rank in ranks if not self._is_refused(rank, request))
        if ranks:
            pending = self._pend(request, now)
            pending.add_known(ranks, known)
            self._look(request.key, pending)

    def _ask(self, ranks: tuple[int, ...], id: int) -> None:
        """Ask for the whole requests of ``id``, which was dropped. A join that comes first must wait for them."""
        self._outgoing.append(Outgoing(ranks, Unknown((id,))))
        for rank in ranks:
            self._asked.setdefault(rank, Counter())[id] += 1

    def _hear_answers(self, rank: int, ids: Iterable[int], now: float) -> None:
        asked = self._asked.get(rank, Counter())
        asked.subtract(ids)
        if not +asked and self._asked.pop(rank, None) is not None:
            for request in self._early_joins.pop(rank, ()):
                self._take_request(rank, request, now)

    def _take_request(self, rank: int, request: Request, now: float) -> None:
        if request.process_set not in self._sets:
            why = Disagreement(f"process set {request.process_set} has been removed")
            self._refuse(request.key, (rank,), why)
            return
        if request.group and self._is_refused(rank, request):
            return
        if request.operation is Operation.JOIN and rank in self._asked:
            self._early_joins.setdefault(rank, []).append(request)
            return
        pending = self._pend(request, now)
        pending.add(rank, request)
        if request.operation is Operation.JOIN:
            self._join(rank, request.process_set)
        self._look(request.key, pending)

    def _is_refused(self, rank: int, request: Request) -> bool:
        why = self._groups.refusal((request.process_set, request.group), rank)
        if why is not None:
            self._refuse(request.key, (rank,), why)
        return why is not None

    def _take_rejection(self, rank: int, rejection: Rejection) -> None:
        """Members that submit the tensor, or have done so, get an error; only then is the name free again."""
        key = rejection.key
        if rejection.process_set not in self._sets:
            self._refuse(key, (rank,), Disagreement(f"process set {rejection.process_set} has been removed"))
        elif key in self._pending:
            self._pending[key].reject(rank, rejection)
            self._look(key, self._pending[key])
        else:
            self._rejected.setdefault(key, {})[rank] = rejection
            self._look_rejected(key)

    def _look_rejected(self, key: Key) -> None:
        """Drop a tensor that no rank has submitted once no rank can submit it any more."""
        rejected, joined = self._rejected[key], self._joined.get(key[0], ())
        if all(rank in rejected or rank in joined for rank in self._sets.ranks(key[0])):
            self._dismiss(key)

    def _dismiss(self, key: Key) -> None:
        self._retried.pop(key, None)
        self._refuse(key, self._rejected.pop(key), Disagreement("every rank has refused the call"))

    def _join(self, rank: int, process_set: int) -> None:
        """No tensor waits for ``rank`` any more; tensors that waited for it alone run before the end of the join."""
        self._joined.setdefault(process_set, set()).add(rank)
        for key, pending in self._pending.items():
            if key[0] == process_set and pending.operation is not Operation.JOIN:
                self._look(key, pending)
        for key in [key for key in self._rejected if key[0] == process_set]:
            self._look_rejected(key)

    def _pend(self, request: Request, now: float) -> Pending:
        pending = self._pending.get(request.key)
        if pending is None:
            members = self._sets.ranks(request.process_set)
            pending = self._pending[request.key] = Pending(members, request.operation, now)
            self._retried.pop(request.key, None)
            for rank, rejection in self._rejected.pop(request.key, {}).items():
                pending.reject(rank, rejection)
        return pending

    def _look(self, key: Key, pending: Pending) -> None:
        if pending.count == len(pending.members) or (self._joined and pending.lacks_only(self._excused(key, pending))):
            self._complete[key] = pending

    def _urge_id(self, id: int) -> None:
        known = self._cache.get(id)
        if known is not None:
            self._urge(known.response.request.key)
        else:  # dropped since it was sent
            names = (key for key, pending in self._pending.items() if pending.known and pending.known.response.id == id)
            self._urgent.update(names)

    def _note_retry(self, key: Key, now: float) -> None:
        if key in self._rejected:
            self._retried.setdefault(key, now)

    def _urge(self, key: Key) -> None:
        if key in self._pending or self._groups.holds(key):
            self._urgent.add(key)
        elif self._ready:
            self._flush = True

    # Agreement.

    def _agree(self, key: Key, pending: Pending, now: float) -> None:
        """All members that have not joined have submitted ``key``: do they want the same?"""
        response = pending.unchanged(self._cache)
        if response is not None:
            self._cache.use(response.id)
        else:
            requests = pending.all_requests()
            learned = self._learn(pending, requests)
            if isinstance(learned, Disagreement):
                self._fail(key, pending, learned)
                return
            response = learned
        self._unsent.add(response.id)
        if response.request.group:
            group = self._groups.add(Member(response, tuple(pending.submitted())))
            for member in group:
                self._make_ready(member.response, now)
        else:
            self._make_ready(response, now)

    def _learn(self, pending: Pending, requests: Mapping[int, Request]) -> Response | Disagreement:
        why = explain_rejections(pending.rejected) or disagreement(requests, pending.members)
        if why is not None:
            return why
        request = next(iter(requests.values()))
        try:
            told = self._told(request, pending, requests)
        except InvalidRequestError as error:
            return Disagreement(str(error))
        self._next_id += 1
        response = self._new[self._next_id] = Response(self._next_id, request, told)
        if request.operation not in ONCE:
            known = Known(response, compact(requests, pending.members), len(requests) == len(pending.members))
            self._drop(self._cache.learn(known))
        return response

    def _told(self, request: Request, pending: Pending, requests: Mapping[int, Request]) -> tuple[int, ...]:
        """The sizes of the response; carries out operations that exchange no data."""
        if request.operation is Operation.JOIN:
            del self._joined[request.process_set]
            for key in [key for key in self._rejected if key[0] == request.process_set]:
                self._dismiss(key)  # before unnamed tensors are counted afresh
            return (pending.last,)
        if request.operation is Operation.ADD_PROCESS_SET:
            return (self._sets.add(request.splits),)
        if request.operation is Operation.REMOVE_PROCESS_SET:
            self._remove_set(request.root_rank)
        return sizes(requests, pending.members)

    def _remove_set(self, id: int) -> None:
        self._release()
        self._sets.remove(id)
        why = Disagreement(f"process set {id} was removed while the tensor was in flight")
        for key in [key for key in self._pending if key[0] == id]:
            self._refuse(key, self._pending.pop(key).submitted(), why)
        for member in self._groups.take_set(id):
            self._discard(member, why)
        self._rejected = {key: ranks for key, ranks in self._rejected.items() if key[0] != id}
        self._retried = {key: since for key, since in self._retried.items() if key[0] != id}
        self._cache.drop_set(id)
        self._forget.pop(id, None)
        self._joined.pop(id, None)

    def _make_ready(self, response: Response, now: float) -> None:
        request = response.request
        self._ready.append(response)
        self._ready_bytes += request.nbytes
        self._held_since = now if self._held_since is None else self._held_since
        if request.key in self._urgent:
            self._urgent.discard(request.key)
            self._flush = True

    def _fail(self, key: Key, pending: Pending, why: Disagreement) -> None:
        """The ranks disagree about ``key``: it fails, with its group, on all ranks that submitted it."""
        requests = pending.all_requests()
        self._drop(self._cache.drop(key))
        self._refuse(key, pending.answered(), why)
        groups = {request.group for request in requests.values() if request.group}
        if groups:
            self._fail_groups(key[0], groups, requests, why)

    def _fail_groups(
        self, process_set: int, groups: set[str], requests: Mapping[int, Request], why: Disagreement
    ) -> None:
        outstanding = {group: Counter[int]() for group in groups}
        for rank, request in requests.items():
            if request.group:
                outstanding[request.group][rank] = request.group_size - 1
        for group in groups:
            for member in self._groups.take((process_set, group)):
                outstanding[group].subtract(member.ranks)
                self._discard(member, why)
        for key, pending in list(self._pending.items()):
            said = pending.all_requests() if key[0] == process_set else {}
            if groups.intersection(request.group for request in said.values()):
                for rank, request in said.items():
                    outstanding.get(request.group, Counter[int]())[rank] -= 1
                del self._pending[key]
                self._drop(self._cache.drop(key))
                self._refuse(key, pending.answered(), why)
        for group, ranks in outstanding.items():
            self._groups.refuse((process_set, group), why, ranks)
        self._dismiss_groups(process_set, groups)

    def _dismiss_groups(self, process_set: int, groups: set[str]) -> None:
        for key, rejected in list(self._rejected.items()):
            if key[0] == process_set and any(rejection.group in groups for rejection in rejected.values()):
                self._dismiss(key)

    def _discard(self, member: Member, why: Disagreement) -> None:
        """An agreed tensor does not run, because others of its group cannot."""
        request, id = member.response.request, member.response.id
        self._unsent.discard(id)
        self._new.pop(id, None)
        self._cache.drop(request.key)
        self._forget.setdefault(request.process_set, []).append(id)
        self._refuse(request.key, member.ranks, why)

    def _refuse(self, key: Key, ranks: Iterable[int], why: Disagreement) -> None:
        self._urgent.discard(key)
        self._outgoing.append(Outgoing(tuple(ranks), Refuse(key[0], key[1], why.text, why.property, why.values)))

    # Decisions.

    def _release(self) -> None:
        """Send the ready tensors."""
        unison = self._is_unison()
        batches = plan(self._ready, self._parameters.fusion_threshold, self._isolate_groups)
        self._ready.clear()
        self._ready_bytes = 0
        self._flush, self._held_since = False, None
        for process_set, group in groupby(batches, key=lambda batch: batch[0].request.process_set):
            self._outgoing.append(self._run(process_set, list(group), unison))

    def _is_unison(self) -> bool:
        """Whether all ranks have lately waited for tensors of a known schedule, and will probably do so again."""
        is_known = self._flush and not (self._pending or self._joined) and self._find_schedule() is not None
        self._repetitions = self._repetitions + 1 if is_known else 0
        return self._repetitions >= REPETITIONS

    def _find_schedule(self) -> Schedule | None:
        """The schedule of the ready tensors, as the ranks find it."""
        ids = [response.id for response in self._ready]
        if len(ids) == 1:
            return None if ids[0] in self._new else alone(self._ready[0])
        return self._schedules.find(ids)

    def use(self, schedule: Schedule) -> None:
        """The ranks ran ``schedule`` in unison."""
        self._next_batch += len(schedule.batches)
        for batch in schedule.batches:
            for response in batch:
                self._cache.use(response.id)

    def _run(self, process_set: int, batches: Sequence[Sequence[Response]], unison: bool) -> Outgoing:
        ids = tuple(tuple(response.id for response in batch) for batch in batches)
        flat = [id for batch in ids for id in batch]
        self._unsent.difference_update(flat)
        new = tuple(self._new.pop(id) for id in flat if id in self._new)
        forget = (*self._forget.pop(process_set, ()), *(id for id in flat if id not in self._cache))
        members = self._sets.ranks(process_set)
        first, self._next_batch = self._next_batch, self._next_batch + len(ids)
        self._schedules.record(first, batches)
        self._schedules.forget(forget)
        return Outgoing(members, Run(ids, new, forget, unison, first, self._news(members)))

    def _news(self, members: Sequence[int]) -> Parameters | None:
        """The parameters, if some of ``members`` do not have them yet."""
        if self._outdated.isdisjoint(members):
            return None
        self._outdated.difference_update(members)
        return self._parameters

    def _drop(self, dropped: Iterable[Known]) -> None:
        """Let the members drop these ids, too; an id that a member has still to run, it drops after the run."""
        for known in dropped:
            if known.response.id not in self._unsent:
                self._forget.setdefault(known.response.request.process_set, []).append(known.response.id)
