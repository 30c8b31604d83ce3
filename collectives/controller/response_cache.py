"""Negotiated collectives, by id; the least recently used is dropped first."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from collectives.api import Request
from collectives.controller.messages import Response

Key = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Known:
    """A negotiated name: the collective, and the request of each rank that submitted it; ``of_all``: of all members."""

    response: Response
    requests: Mapping[int, Request]
    of_all: bool


class Uniform(Mapping[int, Request]):
    """The request of each of ``ranks`` (ascending) where all are equal: it is kept once, for any number of ranks."""

    __slots__ = ("_ranks", "_request")

    def __init__(self, ranks: tuple[int, ...], request: Request) -> None:
        self._ranks = ranks
        self._request = request

    def __getitem__(self, rank: int) -> Request:
        place = bisect_left(self._ranks, rank)
        if self._ranks[place : place + 1] != (rank,):
            raise KeyError(rank)
        return self._request

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)


def compact(requests: Mapping[int, Request], members: tuple[int, ...]) -> Mapping[int, Request]:
    """``requests``, of all ``members`` or some, in as little memory as possible."""
    first, *others = distinct(requests.values())
    if len(requests) == len(members) and all(request == first for request in others):
        return Uniform(members, first)
    return requests


def distinct(requests: Collection[Request]) -> list[Request]:
    """One of each object among ``requests``, of which most are the same."""
    return [*dict(zip(map(id, requests), requests, strict=True)).values()]


class ResponseCache:
    """At most ``capacity`` collectives; 0 turns the cache off. ``version`` grows when one comes or is dropped."""

    def __init__(self, capacity: int) -> None:
        self.version = 0
        self._capacity = capacity
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._ids: dict[int, dict[str, int]] = {}

    def __contains__(self, id: int) -> bool:
        return id in self._known

    def get(self, id: int) -> Known | None:
        """The collective of ``id``; None when it was dropped."""
        return self._known.get(id)

    def use(self, id: int) -> None:
        """``id``, unless it was dropped, is the most recently used from now on."""
        if id in self._known:
            self._known.move_to_end(id)

    def learn(self, known: Known) -> list[Known]:
        """Keep ``known``; returns the collectives dropped for it."""
        key, dropped = known.response.request.key, []
        self.version += 1
        if self._capacity:
            dropped = self.drop(key)
            self._known[known.response.id] = known
            process_set, name = key
            self._ids.setdefault(process_set, {})[name] = known.response.id
            if len(self._known) > self._capacity:
                oldest = next(iter(self._known.values()))
                dropped += self.drop(oldest.response.request.key)
        return dropped

    def resize(self, capacity: int) -> list[Known]:
        """Keep at most ``capacity`` collectives from now on; returns the dropped ones."""
        self._capacity = capacity
        oldest = [known.response.request.key for known in self._known.values()]
        return [known for key in oldest[: max(0, len(oldest) - capacity)] for known in self.drop(key)]

    def drop(self, key: Key) -> list[Known]:
        """Drop the name ``key``; returns its collective, if there was one."""
        process_set, name = key
        of_set = self._ids.get(process_set, {})
        id = of_set.pop(name, None)
        if not of_set:
            self._ids.pop(process_set, None)
        self.version += 1
        return [] if id is None else [self._known.pop(id)]

    def drop_set(self, process_set: int) -> None:
        """Drop all names of ``process_set``."""
        self.version += 1
        for id in self._ids.pop(process_set, {}).values():
            del self._known[id]
