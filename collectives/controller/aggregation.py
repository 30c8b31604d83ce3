"""Pure: combines the messages of the ranks of one host, so that the coordinator gets one per host, not per rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

from collectives.api import Operation, Request
from collectives.controller.messages import ABANDONED, Message, Ready, Refuse, Response, Run, Together, Unknown
from collectives.controller.process_sets import ProcessSets
from collectives.controller.submissions import ONCE

Key: TypeAlias = tuple[int, str]
MOST_APART = 4096
"""The most keys that an aggregator remembers because their requests pass for each rank."""
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


@dataclass(slots=True)
class _NewTensor:
    """A tensor without an id, and which of this host's ``members`` have sent its request, the same on all of them."""

    request: Request
    members: tuple[int, ...]
    sent_by: list[int] = field(default_factory=list)
    urgent: bool = False

    @property
    def is_complete(self) -> bool:
        return len(self.sent_by) == len(self.members)


@dataclass(slots=True)
class _Content:
    """The tensors of one message to the coordinator."""

    ids: list[int] = field(default_factory=list)
    urgent_ids: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    urgent: list[Key] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        return {name: tuple(getattr(self, name)) for name in self.__slots__}


class _Forwarded:
    """Tensors to forward to the coordinator, by the ranks that sent them."""

    def __init__(self) -> None:
        self._contents: defaultdict[tuple[int, ...], _Content] = defaultdict(_Content)

    def add(self, id: int, *ranks: int) -> None:
        self._contents[ranks].ids.append(id)

    def urge(self, id: int, *ranks: int) -> None:
        self._contents[ranks].urgent_ids.append(id)

    def add_new(self, request: Request, *ranks: int) -> None:
        self._contents[ranks].requests.append(request)

    def urge_new(self, key: Key, *ranks: int) -> None:
        self._contents[ranks].urgent.append(key)

    def take(self, *ranks: int) -> _Content | None:
        """Remove and return the tensors of ``ranks``."""
        return self._contents.pop(ranks, None)

    def messages(self) -> list[Upward]:
        """A message for each group of ranks that has not been taken."""
        return [_message(ranks, content.fields()) for ranks, content in self._contents.items()]


def _message(ranks: tuple[int, ...], fields: dict[str, Any]) -> Upward:
    return (ranks[0], Ready(**fields)) if len(ranks) == 1 else (None, Together(ranks, **fields))


class Aggregator:
    """Holds a tensor until all ``ranks`` (those of this host) in its process set have sent it; forwards the rest.

    They send the id of a cached tensor, or the request of a new one, which must be the same on all of them. It learns
    the ids from the coordinator's messages, and forwards an unknown id unchanged. Some tensors cannot be combined: a
    rank sent another request, or refused the call, or has joined, or the id was dropped. These are forwarded for each
    rank. So are the new tensors of groups. ``process_sets`` are those at the start; it learns later ones from the
    coordinator's messages, too.
    """

    def __init__(self, ranks: Iterable[int], process_sets: ProcessSets) -> None:
        self._ranks = frozenset(ranks)
        self._members = {id: self._here(process_sets.ranks(id)) for id in process_sets.ids()}
        self._tensors: dict[int, _Tensor] = {}
        self._ids: dict[Key, int] = {}
        self._held: set[int] = set()
        self._new: dict[Key, _NewTensor] = {}  # until they have run
        self._held_new: set[Key] = set()
        self._apart: dict[Key, None] = {}  # tensors whose requests are forwarded for each rank, until they have run
        self._apart_sets: set[int] = set()  # a member has joined, or removes the set
        self._removals: dict[Key, int] = {}

    @property
    def holds(self) -> bool:
        """Whether tensors wait here for other ranks of this host."""
        return bool(self._held or self._held_new)

    def up(self, rank: int, message: Message) -> list[Upward]:
        """The messages for the coordinator after ``rank`` has sent ``message``."""
        if not isinstance(message, Ready):
            return [(rank, message)]
        forwarded = _Forwarded()
        self._take(rank, message, forwarded)
        own = forwarded.take(rank)
        if not (own or message.answered or message.rejected or message.abandoned):
            return forwarded.messages()
        return [*forwarded.messages(), (rank, replace(message, **(own or _Content()).fields()))]

    def down(self, message: Message) -> list[Upward]:
        """Learn from a message to ranks of this host; returns the messages for the coordinator that follow from it."""
        forwarded = _Forwarded()
        if isinstance(message, Run):
            self._run(message, forwarded)
        elif isinstance(message, Unknown):
            self._forget(message.ids, forwarded)
        elif isinstance(message, Refuse):
            self._refuse(message, forwarded)
        return forwarded.messages()

    def flush(self) -> list[Upward]:
        """The held tensors, for each rank. Until such a tensor has run, it is forwarded at once for later ranks."""
        forwarded = _Forwarded()
        for id in sorted(self._held):
            self._separate(id, forwarded)
        self._flush_new(forwarded)
        return forwarded.messages()

    def _flush_new(self, forwarded: _Forwarded) -> None:
        for key in [key for key in self._new if key in self._held_new]:
            self._separate_new(key, forwarded)

    def _here(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self._ranks.intersection(ranks)))

    # Messages from ranks.

    def _take(self, rank: int, message: Ready, forwarded: _Forwarded) -> None:
        if message.answered:  # the coordinator needs the requests of these ids before the answer
            for request in message.requests:
                self._separate_new(request.key, forwarded)
            self._flush_new(forwarded)
        for request in message.requests:
            self._take_request(request, rank, forwarded)
        for key in chain((rejection.key for rejection in message.rejected), message.abandoned):
            self._separate_key(key, forwarded)
        for id in message.ids:
            self._take_id(id, rank, forwarded)
        for key in message.urgent:
            self._urge_new(key, rank, forwarded)
        for id in message.urgent_ids:
            self._urge(id, rank, forwarded)

    def _take_request(self, request: Request, rank: int, forwarded: _Forwarded) -> None:
        if request.operation is Operation.JOIN:
            self._separate_set(request.process_set, forwarded)
        elif request.operation is Operation.REMOVE_PROCESS_SET:
            self._removals[request.key] = request.root_rank
            self._separate_set(request.root_rank, forwarded)
        elif request.key in self._ids or request.group:
            self._separate_key(request.key, forwarded)
        elif request.operation not in ONCE:
            self._take_new(request, rank, forwarded)
            return
        forwarded.add_new(request, rank)

    def _take_new(self, request: Request, rank: int, forwarded: _Forwarded) -> None:
        key = request.key
        members = self._members.get(request.process_set, ())
        known = self._new.get(key, _NewTensor(request, members))
        is_alone = rank not in members or request.process_set in self._apart_sets
        if is_alone or known.request != request or rank in known.sent_by:
            self._separate_new(key, forwarded)
        if key in self._apart:
            forwarded.add_new(request, rank)
            return
        self._new[key] = known
        known.sent_by.append(rank)
        if not known.is_complete:
            self._held_new.add(key)
            return
        self._held_new.discard(key)
        forwarded.add_new(request, *members)
        if known.urgent:
            forwarded.urge_new(key, *members)

    def _urge_new(self, key: Key, rank: int, forwarded: _Forwarded) -> None:
        tensor = self._new.get(key)
        if tensor is None or rank not in tensor.sent_by:
            forwarded.urge_new(key, rank)
        elif not tensor.urgent:
            tensor.urgent = True
            if tensor.is_complete:
                forwarded.urge_new(key, *tensor.members)

    def _separate_new(self, key: Key, forwarded: _Forwarded) -> None:
        """Forward the new tensor ``key`` for each rank, from now on until it has run."""
        self._set_apart(key)
        tensor = self._new.pop(key, None)
        if tensor is None or key not in self._held_new:
            return
        self._held_new.discard(key)
        for rank in tensor.sent_by:
            forwarded.add_new(tensor.request, rank)
        if tensor.urgent:
            forwarded.urge_new(key, tensor.sent_by[0])

    def _set_apart(self, key: Key) -> None:
        """Forward each request for ``key`` at once. The oldest of many keys is forgotten: its tensor may never run.

        If it does run, its requests are held for a second at most.
        """
        self._apart.pop(key, None)
        self._apart[key] = None
        if len(self._apart) > MOST_APART:
            del self._apart[next(iter(self._apart))]

    def _separate_key(self, key: Key, forwarded: _Forwarded) -> None:
        """Forward the tensor ``key`` for each rank, with an id or not."""
        if key in self._ids:
            self._separate(self._ids[key], forwarded)
        self._separate_new(key, forwarded)  # the id may be dropped before the tensor runs

    def _separate_set(self, process_set: int, forwarded: _Forwarded) -> None:
        self._apart_sets.add(process_set)
        for id in self._of_set(process_set):
            self._separate(id, forwarded)
        for key in [key for key in self._new if key[0] == process_set]:
            self._separate_new(key, forwarded)

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
        if tensor.request.process_set in self._apart_sets:
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
                self._end_new(tensor.request.key)
        for response in message.responses:
            self._follow(response, forwarded)
        self._forget(message.forget, forwarded)

    def _learn(self, response: Response) -> None:
        request = response.request
        self._tensors[response.id] = _Tensor(request, self._members[request.process_set])
        self._ids[request.key] = response.id
        self._end_new(request.key)

    def _end_new(self, key: Key) -> None:
        self._new.pop(key, None)
        self._apart.pop(key, None)

    def _refuse(self, message: Refuse, forwarded: _Forwarded) -> None:
        key = message.process_set, message.name
        self._apart_sets.discard(self._removals.pop(key, -1))
        if key in self._ids:
            self._forget((self._ids[key],), forwarded)
        if message.text == ABANDONED or key in self._held_new:  # others may have sent it, and it may still run
            self._separate_new(key, forwarded)
        else:
            self._new.pop(key, None)  # one that is apart stays so: a rank may have sent it again already

    def _follow(self, response: Response, forwarded: _Forwarded) -> None:
        """Apply the collectives that change the process sets or the joined ranks; none of them is ever cached."""
        request = response.request
        if request.operation is Operation.JOIN:
            self._apart_sets.discard(request.process_set)
        elif request.operation is Operation.ADD_PROCESS_SET:
            self._members[response.sizes[0]] = self._here(request.splits)
            self._end_apart(response.sizes[0])
        elif request.operation is Operation.REMOVE_PROCESS_SET:
            self._remove_set(request.root_rank, forwarded)
            self._removals.pop(request.key, None)

    def _remove_set(self, process_set: int, forwarded: _Forwarded) -> None:
        """Later requests for the set pass at once, because another set may get its number."""
        self._separate_set(process_set, forwarded)
        self._forget(self._of_set(process_set), forwarded)
        self._members.pop(process_set, None)
        self._end_apart(process_set)
        self._apart_sets.discard(process_set)

    def _end_apart(self, process_set: int) -> None:
        self._apart = {key: None for key in self._apart if key[0] != process_set}

    def _of_set(self, process_set: int) -> list[int]:
        return [id for id, tensor in self._tensors.items() if tensor.request.process_set == process_set]

    def _forget(self, ids: Iterable[int], forwarded: _Forwarded) -> None:
        for id in ids:
            if id in self._tensors:
                tensor = self._tensors[id]
                key = tensor.request.key
                # The coordinator may have it from some ranks, and the others will send their requests.
                if tensor.separate or tensor.sent_by:
                    self._set_apart(key)
                self._separate(id, forwarded)
                del self._tensors[id]
                if self._ids.get(key) == id:
                    del self._ids[key]
