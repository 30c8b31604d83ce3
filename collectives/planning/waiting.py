"""Pure: the tensors that wait for missing ranks, as values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple, TypeAlias

__all__ = ["Key", "Pending", "Waiting", "stalled_join"]

Key: TypeAlias = tuple[int, str]

SAME_SECONDS = 1.0
"""Ranks that fell silent within this time of each other are reported together."""


class Waiting(NamedTuple):
    """A tensor that only some members submitted: since when, in seconds of ``time.monotonic()``, and which did not.

    ``silent``: the missing ranks have not submitted anything else since then, either.
    """

    since: float
    missing: tuple[int, ...]
    submitted: tuple[int, ...]
    silent: bool = False


Pending: TypeAlias = Mapping[Key, Waiting]
"""(Process set, name) -> the ranks that it waits for."""


def stalled_join(join: Waiting, heard: Mapping[int, float], waiting: Collection[int]) -> Waiting | None:
    """The ranks that may stall ``join``, a join that is not over; None if no rank does.

    Ranks that have joined wait as long as the others have data. So the wait for a missing rank begins with its last
    message (``heard``: rank -> time). A rank in ``waiting`` stalls nothing: one of its tensors waits for another rank.
    """
    since = {rank: max(join.since, heard.get(rank, join.since)) for rank in join.missing if rank not in waiting}
    if not since:
        return None
    first = min(since.values())
    silent = tuple(rank for rank, last in since.items() if last <= first + SAME_SECONDS)
    return Waiting(first, silent, join.submitted, silent=True)
