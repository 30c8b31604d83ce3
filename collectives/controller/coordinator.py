"""The coordinator's side of the negotiation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from collectives.api import EngineError, InvalidRequestError, Operation, Parameters, Request
from collectives.controller.agreement import Disagreement, disagreement, explain_rejections, offers, sizes
from collectives.controller.groups import GroupMember, Groups
from collectives.controller.joins import Joins
from collectives.controller.kind_mismatch import KindMismatch
from collectives.controller.messages import (
    ABANDONED,
    Leave,
    Left,
    Message,
    Ready,
    Rejection,
    Response,
    Stop,
    Together,
    Unknown,
)
from collectives.controller.process_sets import ProcessSets
from collectives.controller.refusals import Refusals
from collectives.controller.releases import Outbox, Outgoing, Releases
from collectives.controller.response_cache import Known, ResponseCache, compact
from collectives.controller.schedules import Schedule
from collectives.controller.submissions import ONCE, Pending, Rejections, Submissions
from collectives.controller.waits import Waiting

Key = tuple[int, str]


class Coordinator:
    """Collects what each rank has ready and decides which batches run, in one order for all process sets.

    Feed it with :meth:`receive`, then ask :meth:`decide`. ``now`` is any monotonic time in seconds. Ready tensors are
    held for at most the cycle time of the ``parameters`` to fuse with others that are half-submitted, and not at all
    once a caller waits. Patient parameters hold them even if nothing is half-submitted: where ranks share their cores
    with the computation, moving data early only slows the computation down. ``isolate_groups`` is as in
    :func:`collectives.controller.fusion.plan`. ``process_sets`` is the coordinator's own copy: it changes before those
    of the ranks do.
    """

    def __init__(self, process_sets: ProcessSets, parameters: Parameters, isolate_groups: bool = False) -> None:
        self._sets = process_sets
        self._outbox = Outbox()
        self._cache = ResponseCache(parameters.cache_capacity)
        self._releases = Releases(process_sets, self._cache, self._outbox, parameters, isolate_groups)
        self._groups = Groups()
        self._joins = Joins()
        self._rejections = Rejections()
        self._submissions = Submissions(process_sets, self._joins, self._rejections)
        self._pending = self._submissions.pending
        self._urgent: set[Key] = set()
        self._refusals = Refusals(
            self._outbox, self._pending, self._groups, self._rejections, self._releases, self._urgent
        )
        self._leaving = False
        self._left: set[int] = set()

    @property
    def deadline(self) -> float | None:
        """When :meth:`decide` must be called again, at the latest; None when only a message can change anything."""
        return self._releases.deadline

    @property
    def is_waiting(self) -> bool:
        """Whether some tensor is half-submitted."""
        return bool(self._pending) or self._rejections.is_waiting

    def waiting(self) -> dict[Key, Waiting]:
        """For each half-submitted tensor: the ranks that have submitted it, and those that have not.

        A join is among them only if missing ranks are silent.
        """
        retried = {
            key: self._rejections.waiting(key, since, self._sets.ranks(key[0]), self._joins.ranks(key[0]))
            for key, since in self._rejections.retries().items()
        }
        tensors = self._submissions.waiting() | retried
        return tensors | self._submissions.stalled_joins(tensors.values())

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Handle ``message`` from ``rank``."""
        if isinstance(message, Ready | Together):
            if not self._leaving:
                if self._joins:
                    self._joins.hear(_senders(rank, message), now)
                self._take(rank, message, now)
        elif isinstance(message, Leave):
            self._leave(rank, message)
        elif isinstance(message, Left):
            self._left.add(rank)
            if len(self._left) == self._sets.size:
                self._outbox.send(range(self._sets.size), Left())
        else:
            raise EngineError(f"rank {rank} sent {message!r}, which only a coordinator may send")

    @property
    def may_wait_for_each_other(self) -> bool:
        """Whether callers wait for several tensors that are half-submitted, or held."""
        return len(self._urgent) > 1

    def kind_mismatches(self, before: float) -> list[KindMismatch]:
        """The calls of one name and different kinds that wait for each other, submitted ``before`` a time."""
        return self._submissions.kind_mismatches(before)

    def awaited(self, before: float) -> dict[Key, Waiting]:
        """The half-submitted tensors that callers wait for, submitted ``before`` a time in monotonic seconds."""
        return self._submissions.of_keys(self._urgent, before)

    def fail(self, keys: Iterable[Key], why: Disagreement) -> None:
        """Half-submitted tensors fail on all ranks that submitted them: the others never will. Joins go on."""
        for key in keys:
            if self._submissions.is_join(key):
                continue
            pending = self._pending.pop(key, None)  # None: it has failed with its group
            if pending is not None:
                self._refusals.fail(key, pending, why)

    def submissions(self, sender: int, message: Message) -> Iterator[tuple[Key, tuple[int, ...], bool]]:
        """The tensors that ``message`` submits: each with its ranks, and whether it came as an id.

        For observers, before :meth:`receive`. An id that was dropped is left out: the whole request will follow.
        """
        if isinstance(message, Ready | Together):
            ranks = _senders(sender, message)
            for id in message.ids:
                known = self._cache.get(id)
                if known is not None:
                    yield known.response.request.key, ranks, True
            for request in message.requests:
                yield request.key, ranks, False

    @property
    def parameters(self) -> Parameters:
        """The parameters of the next batch."""
        return self._releases.parameters

    def propose(self, parameters: Parameters) -> None:
        """Let ``parameters`` hold on all ranks, from the next batch on, under the next version."""
        self._releases.propose(parameters)

    @property
    def is_changing(self) -> bool:
        """Whether some ranks do not have the parameters yet."""
        return self._releases.is_changing

    def use(self, schedule: Schedule, times: int = 1) -> None:
        """The ranks ran ``schedule`` without asking, so many ``times``."""
        self._releases.use(schedule, times)

    def decide(self, now: float) -> list[Outgoing]:
        """The messages to send now, in order."""
        if self._releases and self._releases.is_due(now, self._submissions.are_half_submitted):
            self._release()
        return self._outbox.take()

    def _release(self) -> None:
        self._releases.release(undisturbed=not (self._pending or self._joins))

    def unanswered(self) -> tuple[int, ...]:
        """The ranks that have not left yet."""
        return tuple(rank for rank in range(self._sets.size) if rank not in self._left)

    def _leave(self, rank: int, message: Leave) -> None:
        if not self._leaving:
            self._leaving = True
            self._release()
            stop = Stop(rank, self._refusals.announced(), message.cause, message.last)
            self._pending.clear()
            self._rejections.clear()
            self._outbox.send(range(self._sets.size), stop)

    # Messages from ranks.

    def _take(self, rank: int, message: Ready | Together, now: float) -> None:
        ranks = _senders(rank, message)
        self._take_ids(ranks, message.ids, now)
        for request in message.requests:
            self._take_request(ranks, request, now)
        if isinstance(message, Ready):
            self._take_failures(rank, message, now)
        for key in message.urgent:
            self._urge_new(rank, key, now)
        for id in message.urgent_ids:
            self._urge_id(id)
        # Only now: a group may fail, and then all its tensors must be here.
        for key, pending in self._submissions.take_complete():
            self._agree(key, pending, now)

    def _take_failures(self, rank: int, message: Ready, now: float) -> None:
        """Calls that one rank has rejected or abandoned, and ids that were unknown."""
        for rejection in message.rejected:
            self._take_rejection(rank, rejection)
        for rejection in message.rejected:  # only now: another rank may have rejected a shorter group
            self._look_rejected(rejection.key)
        if message.answered:
            for join in self._joins.answer(rank, message.answered):
                self._take_request((rank,), join, now)
        for key in message.abandoned:
            self._abandon(rank, key)

    def _take_ids(self, ranks: tuple[int, ...], ids: tuple[int, ...], now: float) -> None:
        """Take the ids of a message. Other hosts often send the same ones."""
        if not self._submissions.add_together(ids, ranks, self._cache):
            for id in ids:
                self._take_id(ranks, id, now)
            self._submissions.expect_together(ids, ranks, self._cache)

    def _take_id(self, ranks: tuple[int, ...], id: int, now: float) -> None:
        known = self._cache.get(id)
        if known is None or not (known.of_all or known.requests.keys() >= set(ranks)):
            self._outbox.send(ranks, Unknown((id,)))
            self._joins.ask(ranks, id)
            return
        request = known.response.request
        if request.group:
            ranks = tuple(rank for rank in ranks if not self._refusals.is_refused(rank, request))
        if ranks:
            pending = self._submissions.open(request, now)
            pending.add_known(ranks, known)
            self._submissions.look(request.key, pending)

    def _take_request(self, ranks: tuple[int, ...], request: Request, now: float) -> None:
        """``ranks`` are several for requests of a host only, which are of no group, and no join."""
        if request.process_set not in self._sets:
            self._refuse_unknown_set(request.key, ranks)
            return
        if request.group and self._refusals.is_refused(ranks[0], request):
            return
        if request.operation is Operation.JOIN and self._joins.defer(ranks[0], request):
            return
        pending = self._submissions.open(request, now)
        pending.add(ranks, request)
        if request.operation is Operation.JOIN:
            self._join(ranks[0], request.process_set)
        self._submissions.look(request.key, pending)

    def _refuse_unknown_set(self, key: Key, ranks: tuple[int, ...]) -> None:
        self._refusals.refuse(key, ranks, Disagreement(f"process set {key[0]} has been removed"))

    def _take_rejection(self, rank: int, rejection: Rejection) -> None:
        """Members that submit the tensor, or have done so, get an error; only then is the name free again."""
        key = rejection.key
        if rejection.process_set not in self._sets:
            self._refuse_unknown_set(key, (rank,))
        elif key in self._pending:
            self._pending[key].reject(rank, rejection)
            self._submissions.look(key, self._pending[key])
        else:
            self._rejections.add(rank, rejection)

    def _abandon(self, rank: int, key: Key) -> None:
        """The tensor waits for ``rank`` again; the others may still want it. A group that has begun to run goes on."""
        pending = self._pending.get(key)
        if pending is None or self._groups.has_begun((key[0], pending.group)):
            return
        if self._submissions.abandon(rank, key):
            if key not in self._pending:
                self._urgent.discard(key)
            self._outbox.refuse(key, (rank,), Disagreement(ABANDONED))

    def _look_rejected(self, key: Key) -> None:
        """Drop a tensor that no rank has submitted once no rank can submit it any more."""
        if key[0] in self._sets and self._rejections.is_over(key, self._sets.ranks(key[0]), self._joins.ranks(key[0])):
            self._refusals.dismiss_call(key)

    def _join(self, rank: int, process_set: int) -> None:
        """No tensor waits for ``rank`` any more; tensors that waited for it alone run before the end of the join."""
        self._joins.add(rank, process_set)
        self._submissions.look_again(process_set)
        for key in self._rejections.of_set(process_set):
            self._look_rejected(key)

    def _urge_new(self, rank: int, key: Key, now: float) -> None:
        if self._submissions.withdraw(rank, key):
            self._refusals.refuse(key, (rank,), Disagreement("the rank has called join() again"))
        else:
            self._rejections.retry(key, now)
        self._urge(key)

    def _urge_id(self, id: int) -> None:
        known = self._cache.get(id)
        if known is not None:
            self._urge(known.response.request.key)
        else:  # dropped since it was sent
            self._urgent.update(self._submissions.of_id(id))

    def _urge(self, key: Key) -> None:
        if key in self._pending or self._groups.holds(key):
            self._urgent.add(key)
        else:
            self._releases.urge()

    # Agreement.

    def _agree(self, key: Key, pending: Pending, now: float) -> None:
        """All members that have not joined have submitted ``key``: do they want the same?"""
        response = pending.unchanged(self._cache)
        if response is not None:
            self._cache.use(response.id)
        else:
            learned = self._learn(pending)
            if isinstance(learned, Disagreement):
                if pending.operation is Operation.JOIN:
                    self._release()  # operations with stand-ins come first
                    self._joins.end(key[0])
                self._refusals.fail(key, pending, learned)
                return
            response = learned
        self._releases.expect(response)
        if response.request.group:
            for member in self._groups.add(GroupMember(response, tuple(pending.submitted()))):
                self._make_ready(member.response, now)
        else:
            self._make_ready(response, now)

    def _make_ready(self, response: Response, now: float) -> None:
        key = response.request.key
        self._releases.add(response, key in self._urgent, now)
        self._urgent.discard(key)

    def _learn(self, pending: Pending) -> Response | Disagreement:
        requests = pending.all_requests()
        why = explain_rejections(pending.rejected) or disagreement(requests, pending.members)
        if why is not None:
            return why
        request = next(iter(requests.values()))
        try:
            response = self._releases.introduce(
                request, self._sizes(request, pending, requests), offers(request, requests)
            )
        except InvalidRequestError as error:
            return Disagreement(str(error))
        if request.operation not in ONCE:
            known = Known(response, compact(requests, pending.members), len(requests) == len(pending.members))
            self._releases.learn(known)
        return response

    def _sizes(self, request: Request, pending: Pending, requests: Mapping[int, Request]) -> tuple[int, ...]:
        """The sizes of the response; carries out operations that exchange no data."""
        if request.operation is Operation.JOIN:
            self._joins.end(request.process_set)
            for key in self._rejections.of_set(request.process_set):
                self._refusals.dismiss(key)  # before unnamed tensors are counted afresh
            return (pending.last,)
        if request.operation is Operation.ADD_PROCESS_SET:
            return (self._sets.add(request.splits),)
        if request.operation is Operation.REMOVE_PROCESS_SET:
            self._remove_set(request.root_rank)
        return sizes(requests, pending.members)

    def _remove_set(self, id: int) -> None:
        self._release()
        self._sets.remove(id)
        self._refusals.remove_set(id)
        self._releases.remove_set(id)
        self._joins.end(id)


def _senders(sender: int, message: Ready | Together) -> tuple[int, ...]:
    return message.ranks if isinstance(message, Together) else (sender,)
