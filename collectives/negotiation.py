"""Pure state machines that bring all ranks to one order: no socket, no clock, no thread.

``Coordinator`` lives on rank 0, ``Worker`` on every rank. Both are fed with messages and say what to send or to run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from collectives.agreement import disagreement, sizes
from collectives.api import EngineError, Request
from collectives.fusion import plan
from collectives.messages import Leave, Left, Message, Ready, Refuse, Response, Run, Stop, Unknown
from collectives.process_sets import ProcessSets

__all__ = ["Batch", "Coordinator", "Outgoing", "Refusal", "Worker"]

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message and the ranks that must get it."""

    ranks: tuple[int, ...]
    message: Message


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors to run as one exchange."""

    responses: tuple[Response, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor that the ranks disagree about."""

    key: Key
    text: str


@dataclass(slots=True)
class _Known:
    """A negotiated name: what the collective is, and what each member last said."""

    response: Response
    requests: dict[int, Request]


@dataclass(slots=True)
class _Pending:
    """A name that some members have submitted. ``by_id`` counts those who sent only the id of ``known``."""

    members: tuple[int, ...]
    known: _Known | None
    requests: dict[int, Request] = field(default_factory=dict)
    by_id: int = 0


class Coordinator:
    """Collects what each rank has ready and decides what runs, in one order for all process sets.

    Feed it with :meth:`receive`, then ask :meth:`decide`. ``now`` is any monotonic time in seconds. Ready tensors are
    held for at most ``cycle_time`` to fuse with others that are half-submitted, and not at all once a caller waits.
    When ``patient``, they are held even if nothing is half-submitted: for ranks that share their cores with the
    computation, where moving data early only slows down what computes the rest.
    """

    def __init__(
        self,
        process_sets: ProcessSets,
        fusion_threshold: int,
        cycle_time: float,
        cache_capacity: int,
        patient: bool = False,
    ) -> None:
        self._sets = process_sets
        self._threshold = fusion_threshold
        self._cycle_time = cycle_time
        self._capacity = cache_capacity
        self._patient = patient
        self._pending: dict[Key, _Pending] = {}
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._ids: dict[Key, int] = {}
        self._next_id = 0
        self._urgent: set[Key] = set()
        self._ready: list[Response] = []
        self._ready_bytes = 0
        self._new: dict[int, Response] = {}
        self._forget: dict[int, list[int]] = {}
        self._flush = False
        self._held_since: float | None = None
        self._replies: list[Outgoing] = []
        self._leaving: int | None = None
        self._left: set[int] = set()

    @property
    def deadline(self) -> float | None:
        """When :meth:`decide` must be called again, at the latest; None when only a message can change anything."""
        since = self._held_since  # read once: the communication thread asks while others drive
        return None if since is None else since + self._cycle_time

    def receive(self, rank: int, message: Message, now: float) -> None:
        """Take in what ``rank`` said."""
        if isinstance(message, Ready):
            if self._leaving is None:
                self._take(rank, message, now)
        elif isinstance(message, Leave):
            self._leave(rank)
        elif isinstance(message, Left):
            self._left.add(rank)
            if len(self._left) == self._sets.size:
                self._replies.append(Outgoing(self._everybody(), Left()))
        else:
            raise EngineError(f"rank {rank} sent {message!r}, which only a coordinator may send")

    def decide(self, now: float) -> list[Outgoing]:
        """What to send now, in order."""
        runs = self._release() if self._ready and self._is_due(now) else []
        replies, self._replies = self._replies, []
        return runs + replies

    def missing(self) -> dict[Key, tuple[int, ...]]:
        """For each half-submitted tensor the ranks that have not submitted it."""
        return {
            key: tuple(rank for rank in pending.members if rank not in pending.requests)
            for key, pending in self._pending.items()
        }

    def _is_due(self, now: float) -> bool:
        if self._flush or self._ready_bytes >= self._threshold:
            return True
        if not (self._pending or self._patient):
            return True
        return self.deadline is not None and now >= self.deadline

    def _everybody(self) -> tuple[int, ...]:
        return tuple(range(self._sets.size))

    def _leave(self, rank: int) -> None:
        if self._leaving is None:
            self._leaving = rank
            self._flush = True
            self._pending.clear()
            self._replies.append(Outgoing(self._everybody(), Stop(rank)))

    def _take(self, rank: int, message: Ready, now: float) -> None:
        for id in message.ids:
            self._take_id(rank, id, now)
        for request in message.requests:
            self._add(rank, request, None, now)
        for key in message.urgent:
            self._urge(key)
        for id in message.urgent_ids:
            self._urge_id(id)

    def _take_id(self, rank: int, id: int, now: float) -> None:
        known = self._known.get(id)
        if known is None:
            self._replies.append(Outgoing((rank,), Unknown((id,))))
        else:
            self._add(rank, known.requests[rank], known, now)

    def _urge_id(self, id: int) -> None:
        known = self._known.get(id)
        if known is not None:
            self._urge(known.response.request.key)
        else:  # dropped since it was sent
            names = (key for key, pending in self._pending.items() if pending.known and pending.known.response.id == id)
            self._urgent.update(names)

    def _urge(self, key: Key) -> None:
        if key in self._pending:
            self._urgent.add(key)
        elif self._ready:
            self._flush = True

    def _add(self, rank: int, request: Request, known: _Known | None, now: float) -> None:
        pending = self._pending.get(request.key)
        if pending is None:
            pending = _Pending(self._sets.ranks(request.process_set), known)
            self._pending[request.key] = pending
        pending.requests[rank] = request
        pending.by_id += known is not None and known is pending.known
        if len(pending.requests) == len(pending.members):
            del self._pending[request.key]
            self._complete(request.key, pending, now)

    def _complete(self, key: Key, pending: _Pending, now: float) -> None:
        known = pending.known
        if known is not None and pending.by_id == len(pending.members) and known.response.id in self._known:
            response = known.response
            self._known.move_to_end(response.id)
        else:
            text = disagreement(pending.requests)
            if text is not None:
                self._refuse(key, pending, text)
                return
            response = self._learn(key, pending)
        self._ready.append(response)
        self._ready_bytes += response.request.nbytes
        self._held_since = now if self._held_since is None else self._held_since
        if key in self._urgent:
            self._urgent.discard(key)
            self._flush = True

    def _refuse(self, key: Key, pending: _Pending, text: str) -> None:
        self._urgent.discard(key)
        self._drop(self._ids.pop(key, None))
        self._replies.append(Outgoing(pending.members, Refuse(key[0], key[1], text)))

    def _learn(self, key: Key, pending: _Pending) -> Response:
        self._drop(self._ids.pop(key, None))
        self._next_id += 1
        request = pending.requests[pending.members[0]]
        response = Response(self._next_id, request, sizes(pending.requests, pending.members))
        self._new[response.id] = response
        if self._capacity:
            self._ids[key] = response.id
            self._known[response.id] = _Known(response, pending.requests)
        else:
            self._forget.setdefault(request.process_set, []).append(response.id)
        while len(self._known) > self._capacity:
            self._evict()
        return response

    def _evict(self) -> None:
        id, known = next(iter(self._known.items()))
        self._ids.pop(known.response.request.key, None)
        self._drop(id)

    def _drop(self, id: int | None) -> None:
        known = self._known.pop(id, None) if id is not None else None
        if known is not None:
            self._forget.setdefault(known.response.request.process_set, []).append(known.response.id)

    def _release(self) -> list[Outgoing]:
        batches = plan(self._ready, self._threshold)
        self._ready.clear()
        self._ready_bytes = 0
        self._flush, self._held_since = False, None
        by_set = groupby(batches, key=lambda batch: batch[0].request.process_set)
        groups = [(process_set, list(group)) for process_set, group in by_set]
        # Backwards, so that the last message of a set tells what to forget: an earlier one may still use it.
        return [self._run(process_set, group) for process_set, group in reversed(groups)][::-1]

    def _run(self, process_set: int, batches: Sequence[Sequence[Response]]) -> Outgoing:
        ids = tuple(tuple(response.id for response in batch) for batch in batches)
        new = tuple(self._new.pop(id) for batch in ids for id in batch if id in self._new)
        forget = tuple(self._forget.pop(process_set, ()))
        return Outgoing(self._sets.ranks(process_set), Run(ids, new, forget))


class Worker:
    """What one rank has submitted, and what its names are called on the wire."""

    def __init__(self, cache: bool = True) -> None:
        self._cache = cache
        self._in_flight: dict[Key, Request] = {}
        self._ids: dict[Key, tuple[int, Request]] = {}
        self._responses: dict[int, Response] = {}
        self._sent: dict[Key, int] = {}
        self._requests: list[Request] = []
        self._ready_ids: list[int] = []
        self._urgent: list[Key] = []

    def submit(self, request: Request, urgent: bool = False) -> None:
        """A tensor is ready here; ``urgent`` when a caller waits for it."""
        self._in_flight[request.key] = request
        id, before = self._ids.get(request.key, (0, None))
        if request == before:
            self._ready_ids.append(id)
            self._sent[request.key] = id
        else:
            self._requests.append(request)
        if urgent:
            self._urgent.append(request.key)

    def urge(self, key: Key) -> None:
        """A caller waits for a tensor submitted earlier."""
        if key in self._in_flight:
            self._urgent.append(key)

    def outgoing(self) -> Ready | None:
        """What the coordinator must hear, once; None when there is nothing new."""
        if not (self._ready_ids or self._requests or self._urgent):
            return None
        by_id = [self._ids[key][0] for key in self._urgent if self._sent_as_id(key)]
        by_key = [key for key in self._urgent if not self._sent_as_id(key)]
        message = Ready(tuple(self._requests), tuple(self._ready_ids), tuple(by_key), tuple(by_id))
        self._requests, self._ready_ids, self._urgent = [], [], []
        return message

    def _sent_as_id(self, key: Key) -> bool:
        return key in self._ids and self._ids[key][1] == self._in_flight.get(key)

    def run(self, message: Run) -> list[Batch]:
        """The batches of ``message``; learns its new names, then drops the forgotten ones."""
        for response in message.responses:
            self._responses[response.id] = response
            if self._cache:
                key = response.request.key
                self._ids[key] = (response.id, self._in_flight[key])
        batches = [Batch(tuple(self._responses[id] for id in ids)) for ids in message.batches]
        for batch in batches:
            for response in batch.responses:
                self._finish(response)
        self._forget(message.forget)
        return batches

    def _finish(self, response: Response) -> None:
        del self._in_flight[response.request.key]
        self._sent.pop(response.request.key, None)
        if not self._cache:
            del self._responses[response.id]

    def refuse(self, message: Refuse) -> Refusal:
        """The tensor is not in flight any more."""
        key = (message.process_set, message.name)
        self._in_flight.pop(key, None)
        self._sent.pop(key, None)
        self._ids.pop(key, None)
        return Refusal(key, message.text)

    def resend(self, message: Unknown) -> None:
        """Say in full what the coordinator has dropped; urgently, because it may have been urgent by its id."""
        self._forget(message.ids)
        keys = [key for key, id in self._sent.items() if id in message.ids]
        for key in keys:
            del self._sent[key]
            self._requests.append(self._in_flight[key])
            self._urgent.append(key)

    def _forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            response = self._responses.pop(id, None)
            key = response.request.key if response else None
            if key is not None and self._ids.get(key, (0, None))[0] == id:
                del self._ids[key]
