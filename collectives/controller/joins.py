"""The ranks that have joined, by process set: they take part in the operations of the others, without data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from collectives.api import Request
from collectives.controller.waits import Waiting, stalled_join


class Joins:
    """Also knows the joins that came too early.

    A rank may have submitted a tensor by an id that was dropped, and was asked for the whole request. If its join
    counted before the answer, the tensor would run without its data.
    """

    def __init__(self) -> None:
        self._joined: dict[int, set[int]] = {}
        self._heard: dict[int, float] = {}
        self._asked: dict[int, Counter[int]] = {}
        self._early: dict[int, list[Request]] = {}

    def __len__(self) -> int:
        """The number of process sets of which some rank has joined."""
        return len(self._joined)

    def ranks(self, process_set: int) -> Collection[int]:
        """The ranks that have joined the set."""
        return self._joined.get(process_set, ())

    def add(self, rank: int, process_set: int) -> None:
        """``rank`` has joined."""
        self._joined.setdefault(process_set, set()).add(rank)

    def hear(self, ranks: Iterable[int], now: float) -> None:
        """A message of ``ranks`` came, while some rank has joined."""
        self._heard.update(dict.fromkeys(ranks, now))

    def stalled(self, join: Waiting, waiting: Collection[int]) -> Waiting | None:
        return stalled_join(join, self._heard, waiting)

    def end(self, process_set: int) -> None:
        """All members have joined, or the set is removed."""
        self._joined.pop(process_set, None)

    def ask(self, ranks: Sequence[int], id: int) -> None:
        """Each of ``ranks`` was asked for the whole request of ``id``."""
        for rank in ranks:
            self._asked.setdefault(rank, Counter())[id] += 1

    def defer(self, rank: int, join: Request) -> bool:
        """Whether ``join`` must wait for answers of ``rank``."""
        if rank in self._asked:
            self._early.setdefault(rank, []).append(join)
        return rank in self._asked

    def answer(self, rank: int, ids: Iterable[int]) -> list[Request]:
        """``rank`` has answered for ``ids``; returns the joins that count now."""
        asked = self._asked.get(rank, Counter())
        asked.subtract(ids)
        if not +asked and self._asked.pop(rank, None) is not None:
            return self._early.pop(rank, [])
        return []
