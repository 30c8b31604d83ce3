"""Pure: the tensors that run together again and again, and the batches in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from collectives.api import HOST
from collectives.controller.messages import Response
from collectives.controller.process_sets import GLOBAL

KEPT = 64
"""The number of schedules that a rank keeps."""


class Schedule(NamedTuple):
    """Tensors that run together, and their ``batches``, in order.

    Ranks that have the same ``number``, which is not 0, have the same schedule.
    """

    number: int
    batches: Sequence[Sequence[Response]]


def alone(response: Response) -> Schedule | None:
    """The schedule of one tensor that runs alone; None if the ranks cannot agree on it without the coordinator."""
    request = response.request
    if request.process_set or request.device != HOST or request.group_size > 1:
        return None
    return Schedule(2 * response.id, ((response,),))


class Schedules:
    """The schedules of sets of at least two tensors, as the last ``Run`` message of exactly that set had them.

    Every rank records every message for the global set, in one order. Two ranks may differ only in how far they are.
    """

    def __init__(self) -> None:
        self._by_ids: dict[frozenset[int], Schedule] = {}

    def record(self, first: int, batches: Sequence[Sequence[Response]]) -> None:
        """One message had these ``batches``; ``first`` is the number of the first of them."""
        responses = [*chain.from_iterable(batches)]
        requests = [response.request for response in responses]
        if len(requests) > 1 and all(each.process_set == GLOBAL and each.device == HOST for each in requests):
            ids = frozenset([response.id for response in responses])
            self._by_ids.pop(ids, None)
            self._by_ids[ids] = Schedule(2 * first + 1, batches)
            if len(self._by_ids) > KEPT:
                del self._by_ids[next(iter(self._by_ids))]

    def find(self, ids: Iterable[int]) -> Schedule | None:
        """The schedule of exactly these tensors, in any order."""
        return self._by_ids.get(frozenset(ids))

    def forget(self, ids: Iterable[int]) -> None:
        """Drop the schedules that contain one of ``ids``, which no rank will use again."""
        gone = frozenset(ids)
        if gone:
            self._by_ids = {known: each for known, each in self._by_ids.items() if known.isdisjoint(gone)}

    def clear(self) -> None:
        """Drop all: the parameters have changed, and so would the batches."""
        self._by_ids.clear()
