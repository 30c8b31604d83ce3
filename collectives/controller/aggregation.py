"""Pure: combines the messages of the ranks of one host, so that the coordinator gets one per host, not per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TypeAlias

from collectives.api import Operation, Request
from collectives.controller.messages import Message, Ready, Refuse, Response, Run, Together, Unknown
from collectives.controller.process_sets import ProcessSets

Upward: TypeAlias = tuple[int | None, Message]
"""A message for the coordinator, and its sender: a rank, or None for the host."""


@dataclass(slots=True)
class _Tensor:
    """A cached tensor, and which of this host's ``members`` have sent its id since its last run.

    ``separate``: until the tensor has run, each member's id is forwarded on its own, at once. ``urgent``: a caller
    waits for the tensor; the coordinator learns that together with the id.
    """

    request: Request
    members: tuple[int, ...]
    sent_by: list[int] = field(default_factory=list)
    separate: bool = False
    urgent: bool = False

    def has_run(self) -> None:
        self.sent_by.clear()
        self.separate = self.urgent = False


class _Forwarded:
    """Ids to forward to the coordinator, by the ranks that sent them."""

    def __init__(self) -> None:
        self._ids: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        self._urgent: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def add(self, id: int, *ranks: int) -> None:
        self._ids[ranks].append(id)

    def urge(self, id: int, *ranks: int) -> None:
        self._urgent[ranks].append(id)

    def take(self, *ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Remove and return the ids and the urgent ids of ``ranks``."""
        return tuple(self._ids.pop(ranks, ())), tuple(self._urgent.pop(ranks, ()))

    def messages(self) -> list[Upward]:
        """Remove and return everything, as messages."""
        return [self._message(ranks) for ranks in dict.fromkeys([*self._ids, *self._urgent])]

    def _message(self, ranks: tuple[int, ...]) -> Upward:
        ids, urgent_ids = self.take(*ranks)
        if len(ranks) == 1:
            return ranks[0], Ready(ids=ids, urgent_ids=urgent_ids)
        return None, Together(ranks, ids, urgent_ids)


class Aggregator:
    """Holds a cached id until all ``ranks`` (those of this host) in its process set have sent it; forwards the rest.

    It learns the ids from the coordinator's messages, and forwards an unknown id unchanged. Some ids cannot be combined
    any more: a rank sent the whole request or has joined, or the id was dropped. These are forwarded for each rank.
    ``process_sets`` are those at the start; it learns later ones from the coordinator's messages, too.
    """

    def __init__(self, ranks: Iterable[int], process_sets: ProcessSets) -> None:
        self._ranks = frozenset(ranks)
        self._members = {id: self._here(process_sets.ranks(id)) for id in process_sets.ids()}
        self._tensors: dict[int, _Tensor] = {}
        self._ids: dict[tuple[int, str], int] = {}
        self._held: set[int] = set()
        self._bootstrap: set[int] = set()

    @property
    def holds(self) -> bool:
        """Whether ids wait here for other ranks of this host."""
        return bool(self._held)

    def up(self, rank: int, message: Message) -> list[Upward]:
        """The messages for the coordinator after ``rank`` has sent ``message``."""
        if not isinstance(message, Ready):
            return [(rank, message)]
        forwarded = _Forwarded()
        for request in message.requests:
            self._take_request(request, forwarded)
        for rejection in message.rejected:
            if rejection.key in self._ids:
                self._separate(self._ids[rejection.key], forwarded)
        for id in message.ids:
            self._take_id(id, rank, forwarded)
        for key in message.abandoned:
            if key in self._ids:
                self._separate(self._ids[key], forwarded)
        for id in message.urgent_ids:
            self._urge(id, rank, forwarded)
        ids, urgent_ids = forwarded.take(rank)
        alone = replace(message, ids=ids, urgent_ids=urgent_ids)
        return forwarded.messages() if alone == Ready() else [*forwarded.messages(), (rank, alone)]

    def down(self, message: Message) -> list[Upward]:
        """Learn from a message to ranks of this host; returns the messages for the coordinator that follow from it."""
        forwarded = _Forwarded()
        if isinstance(message, Run):
            self._run(message, forwarded)
        elif isinstance(message, Unknown):
            self._forget(message.ids, forwarded)
        elif isinstance(message, Refuse) and (message.process_set, message.name) in self._ids:
            self._forget((self._ids[message.process_set, message.name],), forwarded)
        return forwarded.messages()

    def flush(self) -> list[Upward]:
        """The held ids, for each rank. Until such a tensor has run, later ids of it are forwarded at once."""
        forwarded = _Forwarded()
        for id in sorted(self._held):
            self._separate(id, forwarded)
        return forwarded.messages()

    def _here(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self._ranks.intersection(ranks)))

    # Messages from ranks.

    def _take_request(self, request: Request, forwarded: _Forwarded) -> None:
        if request.operation is Operation.JOIN:
            self._bootstrap.add(request.process_set)
            for id in self._of_set(request.process_set):
                self._separate(id, forwarded)
        elif request.key in self._ids:
            self._separate(self._ids[request.key], forwarded)

    def _take_id(self, id: int, rank: int, forwarded: _Forwarded) -> None:
        tensor = self._tensors.get(id)
        if tensor is None or self._is_separate(tensor):
            forwarded.add(id, rank)
            return
        tensor.sent_by.append(rank)
        if len(tensor.sent_by) < len(tensor.members):
            self._held.add(id)
            return
        self._held.discard(id)
        forwarded.add(id, *tensor.members)
        if tensor.urgent:
            forwarded.urge(id, *tensor.members)

    def _is_separate(self, tensor: _Tensor) -> bool:
        if tensor.request.process_set in self._bootstrap:
            tensor.separate = True
        return tensor.separate

    def _urge(self, id: int, rank: int, forwarded: _Forwarded) -> None:
        tensor = self._tensors.get(id)
        if tensor is None or tensor.separate:
            forwarded.urge(id, rank)
        elif tensor.sent_by and not tensor.urgent:  # otherwise known already, or already decided to run
            tensor.urgent = True
            if id not in self._held:
                forwarded.urge(id, *tensor.members)

    def _separate(self, id: int, forwarded: _Forwarded) -> None:
        tensor = self._tensors[id]
        tensor.separate = True
        if id in self._held:
            self._held.discard(id)
            for rank in tensor.sent_by:
                forwarded.add(id, rank)
            if tensor.urgent:
                forwarded.urge(id, tensor.sent_by[0])

    # Messages to ranks.

    def _run(self, message: Run, forwarded: _Forwarded) -> None:
        for response in message.responses:
            self._learn(response)
        for id in chain.from_iterable(message.batches):
            tensor = self._tensors.get(id)
            if tensor is not None:
                tensor.has_run()
        for response in message.responses:
            self._follow(response, forwarded)
        self._forget(message.forget, forwarded)

    def _learn(self, response: Response) -> None:
        request = response.request
        self._tensors[response.id] = _Tensor(request, self._members[request.process_set])
        self._ids[request.key] = response.id

    def _follow(self, response: Response, forwarded: _Forwarded) -> None:
        """Apply the collectives that change the process sets or the joined ranks; none of them is ever cached."""
        request = response.request
        if request.operation is Operation.JOIN:
            self._bootstrap.discard(request.process_set)
        elif request.operation is Operation.ADD_PROCESS_SET:
            self._members[response.sizes[0]] = self._here(request.splits)
        elif request.operation is Operation.REMOVE_PROCESS_SET:
            self._forget(self._of_set(request.root_rank), forwarded)
            self._bootstrap.discard(request.root_rank)

    def _of_set(self, process_set: int) -> list[int]:
        return [id for id, tensor in self._tensors.items() if tensor.request.process_set == process_set]

    def _forget(self, ids: Iterable[int], forwarded: _Forwarded) -> None:
        for id in ids:
            if id in self._tensors:
                self._separate(id, forwarded)
                key = self._tensors.pop(id).request.key
                if self._ids.get(key) == id:
                    del self._ids[key]
