"""One rank's side of the negotiation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from collectives.api import MismatchError, Operation, Parameters, Request
from collectives.controller.messages import ABANDONED, Ready, Refuse, Rejection, Response, Run, Unknown
from collectives.controller.schedules import Schedule, Schedules, alone

Label = tuple[int, str]


class Calls:
    """Counts the tensors of each group: those in flight, and the unsent ones among them.

    A label is a process set and a name. So one tensor costs a step, however large its group is.
    """

    def __init__(self) -> None:
        self._in_flight: Counter[Label] = Counter()
        self._unsent: Counter[Label] = Counter()

    def submitted(self, request: Request) -> None:
        """A tensor of a group is in flight, and not sent yet."""
        self._in_flight[_label(request)] += 1
        self.returned(request)

    def returned(self, request: Request) -> None:
        """The coordinator has forgotten the tensor, so it will be sent again."""
        self._unsent[_label(request)] += 1

    def all_sent(self) -> None:
        """The coordinator hears of everything that was unsent."""
        self._unsent.clear()

    def ended(self, request: Request, is_unsent: bool) -> None:
        """The tensor is not in flight any more."""
        _decrease(self._in_flight, _label(request))
        if is_unsent:
            _decrease(self._unsent, _label(request))

    def is_unsent(self, request: Request) -> bool:
        """Whether the coordinator has heard of no tensor of the group that is in flight."""
        label = _label(request)
        return self._unsent[label] == self._in_flight[label]


def _label(request: Request) -> Label:
    return request.process_set, request.group


def _decrease(counter: Counter[Label], label: Label) -> None:
    counter[label] -= 1
    if not counter[label]:
        del counter[label]


Key = tuple[int, str]


class Batch(NamedTuple):
    """Tensors to run as one exchange. A rank that has joined may have no part in some of them, but takes part.

    ``id`` is the number of the batch, the same on all ranks. It runs under ``parameters``. When it has run, it
    ``begins_rounds``, in which the ranks may agree among themselves, or not.
    """

    responses: tuple[Response, ...]
    begins_rounds: bool
    id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor that does not run, and the error that it ends with."""

    key: Key
    error: MismatchError


class Worker:
    """The tensors that one rank has submitted, and the ids of their names on the wire.

    ``parameters`` are this rank's own until those of rank 0 come, with the first batch. ``next_batch`` is the id of the
    next batch, if the ranks run it without the coordinator. ``introduced`` counts the whole requests, by process set.
    """

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.next_batch = 0
        self.introduced: Counter[int] = Counter()
        self._in_flight: dict[Key, Request] = {}
        self._ids: dict[Key, tuple[int, Request]] = {}
        self._responses: dict[int, Response] = {}
        # The ids of the process sets that can be removed: a removal must not look at all names.
        self._ids_of_sets: dict[int, set[int]] = {}
        self._schedules = Schedules()
        self._alone: dict[int, Schedule | None] = {}
        self._sent: dict[Key, int] = {}
        self._requests: dict[Key, Request] = {}
        self._ready_ids: dict[int, Key] = {}
        self._calls = Calls()
        self._urgent: dict[Key, None] = {}
        self._answered: list[int] = []
        self._rejected: list[Rejection] = []
        self._unanswered: set[Key] = set()
        self._abandoned: dict[Key, None] = {}
        self._abandoning: set[Key] = set()

    def submit(self, request: Request, urgent: bool = False) -> None:
        """A tensor is ready here; ``urgent`` when a caller waits for it."""
        key = request.key
        self._in_flight[key] = request
        id, before = self._ids.get(key, (0, None))
        if request is before or request == before:
            self._ids[key] = id, request
            self._ready_ids[id] = key
            self._sent[key] = id
        else:
            self._introduce(key)
        if request.group:
            self._calls.submitted(request)
        if urgent:
            self._urgent[key] = None

    def _introduce(self, key: Key) -> None:
        """Send the whole request."""
        request = self._requests[key] = self._in_flight[key]
        self.introduced[request.process_set] += 1

    def reject(self, request: Request, reason: str) -> None:
        """A call failed here because of its arguments; the members that submit it must not wait for this rank."""
        self._rejected.append(Rejection(request.process_set, request.name, request.group, reason))
        self._unanswered.add(request.key)

    def abandon(self, key: Key) -> Refusal | None:
        """This rank does not want a tensor any more that it has submitted.

        Returns the end of one that the coordinator has not heard of. Otherwise the coordinator answers: the tensor is
        refused here alone, unless all ranks have submitted it. Then it runs.
        """
        if key not in self._in_flight or key in self._abandoning:
            return None
        if not self._is_unsent(key):
            self._abandoned[key] = None
            self._abandoning.add(key)
            return None
        self._urgent.pop(key, None)
        self._end_unsent(key)
        return Refusal(key, MismatchError(ABANDONED, key[1]))

    def _is_unsent(self, key: Key) -> bool:
        """Whether the coordinator has heard of neither the tensor nor its group: of a group, it decides about all."""
        request = self._in_flight[key]
        return self._calls.is_unsent(request) if request.group else self._is_news(key)

    def _is_news(self, key: Key) -> bool:
        return key in self._requests or self._sent.get(key) in self._ready_ids

    def _end_unsent(self, key: Key) -> None:
        """The coordinator will not hear of the tensor."""
        id = self._sent.get(key, 0)
        self._drop(key)
        if self._requests.pop(key, None) is not None:
            self.introduced[key[0]] -= 1
        else:
            del self._ready_ids[id]

    def urge(self, key: Key) -> None:
        """A caller waits for a tensor submitted earlier, or for the end of a call that failed here."""
        if key in self._in_flight or key in self._unanswered:
            self._urgent[key] = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight."""
        return not self._in_flight

    @property
    def has_news(self) -> bool:
        """Whether :meth:`outgoing` has a message."""
        return bool(
            self._ready_ids or self._requests or self._urgent or self._answered or self._rejected or self._abandoned
        )

    def unreported(self) -> Sequence[int]:
        """The ids of all tensors in flight, if the coordinator has heard of none of them and must not hear of others.

        Such tensors may run without the coordinator, if all ranks run them. Empty if this rank must send a message.
        """
        ids = self._ready_ids
        if len(ids) != len(self._in_flight) or self._answered or self._rejected or self._unanswered or self._abandoned:
            return ()
        return tuple(ids)

    def schedule(self) -> Schedule | None:
        """The schedule of all :meth:`unreported` tensors, if a caller waits for one.

        None if this rank knows no schedule of exactly these tensors.
        """
        ids = self.unreported() if self._urgent else ()
        if len(ids) == 1:
            return alone(self._responses[ids[0]])
        return self._schedules.find(ids) if ids else None

    def repeat(self, request: Request) -> Schedule | None:
        """The schedule of ``request`` alone, which was not submitted, if it repeats an earlier one here.

        None if anything is in flight or to be reported, and where the ranks need the coordinator.
        """
        id, before = self._ids.get(request.key, (0, None))
        if before is not request or self._in_flight or self._unanswered or self.has_news:
            return None
        schedule = self._alone.get(id)
        if schedule is None:
            schedule = self._alone[id] = alone(self._responses[id])
        return schedule

    def finish_schedule(self, schedule: Schedule) -> None:
        """All ranks have run ``schedule``, of some :meth:`unreported` tensors."""
        self.next_batch += len(schedule.batches)
        for batch in schedule.batches:
            for response in batch:
                self._finish(response)
        if self._in_flight:
            self._ready_ids = {self._sent[key]: key for key in self._in_flight}
            self._urgent = {key: None for key in self._urgent if key in self._in_flight}
        else:
            self._ready_ids, self._urgent = {}, {}

    def outgoing(self) -> Ready | None:
        """The news for the coordinator, each sent once; None when there is nothing new."""
        if not self.has_news:
            return None
        by_id = [self._ids[key][0] for key in self._urgent if self._sent_as_id(key)]
        by_key = [key for key in self._urgent if not self._sent_as_id(key)]
        message = Ready(
            tuple(self._requests.values()),
            tuple(self._ready_ids),
            tuple(by_key),
            tuple(by_id),
            tuple(self._answered),
            tuple(self._rejected),
            tuple(self._abandoned),
        )
        self._requests, self._ready_ids, self._urgent, self._abandoned = {}, {}, {}, {}
        self._answered, self._rejected = [], []
        self._calls.all_sent()
        return message

    def _sent_as_id(self, key: Key) -> bool:
        return key in self._ids and self._ids[key][1] == self._in_flight.get(key)

    def run(self, message: Run) -> list[Batch]:
        """The batches of ``message``; learns its new names, then drops the forgotten ones."""
        if message.parameters is not None:
            self._adopt(message.parameters)
        for response in message.responses:
            self._learn(response)
        responses = [tuple([self._responses[id] for id in ids]) for ids in message.batches]
        self.next_batch = message.first + len(responses)
        last = self.next_batch - 1
        batches = [
            Batch(batch, message.begins_rounds and number == last, number, self.parameters)
            for number, batch in enumerate(responses, message.first)
        ]
        self._schedules.record(message.first, responses)
        for batch in batches:
            for response in batch.responses:
                self._finish(response)
        self._forget(message.forget)
        return batches

    def _adopt(self, parameters: Parameters) -> None:
        if parameters.version > self.parameters.version:
            self.parameters = parameters
            self._schedules.clear()
            if not parameters.cache_capacity:
                self._ids.clear()

    def _learn(self, response: Response) -> None:
        self._responses[response.id] = response
        if response.request.process_set:
            self._ids_of_sets.setdefault(response.request.process_set, set()).add(response.id)
        own = self._in_flight.get(response.request.key)
        if own is not None and self.parameters.cache_capacity:  # a rank that has joined has no request of its own
            self._ids[own.key] = (response.id, own)

    def _finish(self, response: Response) -> None:
        request = response.request
        self._drop(request.key)
        if request.operation is Operation.REMOVE_PROCESS_SET:
            removed = request.root_rank
            self._forget(self._ids_of_sets.pop(removed, ()))
            for key in [key for key in self._in_flight if key[0] == removed]:  # or the id's next set would get them
                self._drop(key)
            self._unanswered = {key for key in self._unanswered if key[0] != removed}

    def refuse(self, message: Refuse) -> Refusal:
        """The tensor is not in flight any more."""
        key = (message.process_set, message.name)
        self._drop(key)
        self._ids.pop(key, None)
        self._unanswered.discard(key)
        return Refusal(key, message.error())

    def _drop(self, key: Key) -> None:
        request = self._in_flight.pop(key, None)
        if request is not None and request.group:
            self._calls.ended(request, self._is_news(key))
        self._sent.pop(key, None)
        if key in self._abandoning:
            self._abandoning.discard(key)
            self._abandoned.pop(key, None)

    def resend(self, message: Unknown) -> None:
        """Send the whole requests of dropped ids, as urgent ones, because the dropped id may have been urgent."""
        self._forget(message.ids)
        self._answered.extend(message.ids)
        keys = [key for key, id in self._sent.items() if id in message.ids]
        for key in keys:
            del self._sent[key]
            self._introduce(key)
            if self._in_flight[key].group:
                self._calls.returned(self._in_flight[key])
            self._urgent[key] = None
            if key in self._abandoning:  # the coordinator did not know of it
                self._abandoned[key] = None

    def _forget(self, ids: Collection[int]) -> None:
        self._schedules.forget(ids)
        for id in ids:
            self._alone.pop(id, None)
            response = self._responses.pop(id, None)
            if response is None:
                continue
            key = response.request.key
            if self._ids.get(key, (0, None))[0] == id:
                del self._ids[key]
            if key[0]:
                self._ids_of_sets.get(key[0], set()).discard(id)
