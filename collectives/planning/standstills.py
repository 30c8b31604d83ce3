"""Pure: ranks that wait for each other in different calls, so that none of them ever goes on.

Rank 0 may wait in an allreduce that rank 1 does not call before the end of another one, in which it waits for rank 0.

Source: the deadlock of processes that each need all of several resources, as in Chandy, Misra and Haas (1983),
"Distributed deadlock detection", found here by one rank that knows all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.planning.agreement import Disagreement, name_ranks
from collectives.planning.remedies import remedy_of_calls
from collectives.planning.waiting import Key, Pending
from collectives.planning.whereabouts import Whereabouts, cut

__all__ = ["PROPERTY", "Standstill", "standstill", "suspects"]

PROPERTY = "call"
"""The ``property`` of a MismatchError that ends a standstill."""
SHOWN_CALLS = 6


class Standstill(NamedTuple):
    """The tensors ``keys`` wait for each other's ranks; ``why`` tells of the calls of all ranks."""

    keys: tuple[Key, ...]
    why: Disagreement


def suspects(pending: Pending) -> set[int]:
    """The ranks that may stand still: those that wait for each other as far as rank 0 knows. Usually there are none.

    ``pending`` has the tensors that callers wait for.
    """
    called = {rank for waiting in pending.values() for rank in waiting.submitted}
    calls: dict[int, list[Key]] = {}
    for key, waiting in pending.items():
        if not called.issuperset(waiting.missing):
            continue  # it lacks a rank that has made no call
        for rank in waiting.submitted:
            calls.setdefault(rank, []).append(key)
    return _remaining(calls.keys(), lambda rank, ranks: any(_lacks(pending, key, ranks) for key in calls[rank]))


def standstill(pending: Pending, answers: Iterable[Whereabouts]) -> Standstill | None:
    """The standstill of ranks whose ``answers`` make it certain; None if there is none.

    Each of these ranks waits on all threads that may make a call. Each tensor that it waits for is in ``pending``, and
    lacks ranks of the standstill alone. ``answers`` are those given since the last tensor was submitted.
    """
    waits = {each.rank: [(call.process_set, call.name) for call in each.waits] for each in answers if each.is_held}
    held = {
        rank
        for rank, keys in waits.items()
        # A rank that lacks in what it waits for has made that call: rank 0 has yet to hear of it.
        if keys and all(key in pending and rank not in pending[key].missing for key in keys)
    }
    ranks = _remaining(held, lambda rank, ranks: all(_lacks(pending, key, ranks) for key in waits[rank]))
    if not ranks:
        return None
    keys = dict.fromkeys(key for rank in sorted(ranks) for key in waits[rank])
    return Standstill(tuple(keys), _describe({rank: waits[rank] for rank in sorted(ranks)}))


def _remaining(ranks: Collection[int], stays: Callable[[int, Collection[int]], bool]) -> set[int]:
    """The largest part of ``ranks`` in which each rank ``stays``, given the others that do."""
    found, before = set(ranks), -1
    while len(found) != before:
        before = len(found)
        found = {rank for rank in found if stays(rank, found)}
    return found


def _lacks(pending: Pending, key: Key, ranks: Collection[int]) -> bool:
    """Whether a tensor lacks some of ``ranks``, and no others."""
    missing = pending[key].missing
    return bool(missing) and all(rank in ranks for rank in missing)


def _describe(waits: Mapping[int, Sequence[Key]]) -> Disagreement:
    values = {rank: _calls(keys) for rank, keys in waits.items()}
    together: dict[str, list[int]] = {}
    for rank, text in values.items():
        together.setdefault(text, []).append(rank)
    listed = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in together.items())
    change = remedy_of_calls(name for keys in waits.values() for _, name in keys)
    text = f"the ranks wait for each other in different calls, and none of them can go on: {listed}; {change}"
    return Disagreement(text, PROPERTY, tuple(values.items()))


def _calls(keys: Sequence[Key]) -> str:
    shown = [f"{cut(name)!r}" + (f" on process set {set}" if set else "") for set, name in keys[:SHOWN_CALLS]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")
