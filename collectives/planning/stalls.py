"""Pure: which tensors wait for missing ranks, the report about them, and when to give up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from collectives.planning.agreement import name_ranks
from collectives.planning.waiting import Key, Pending, Waiting

__all__ = ["Report", "StallInspector"]

SHOWN_NAMES = 6
SHOWN_CHARACTERS = 100
SOON = 0.1
"""A report may come early by this part of the time between two reports."""


class Report(NamedTuple):
    """The text about the tensors ``keys``, None if there are none.

    ``fatal`` when the job must end with it, because of the missing ``ranks``.
    """

    text: str | None = None
    fatal: bool = False
    ranks: tuple[int, ...] = ()
    keys: tuple[Key, ...] = ()


class StallInspector:
    """Inspects tensors that wait; it reports each after about ``warn_seconds``, and again after each such interval.

    After ``shutdown_seconds`` (0: never) the report is fatal. It has no clock: the caller passes the time.
    """

    def __init__(self, warn_seconds: float, shutdown_seconds: float = 0.0) -> None:
        self._warn = warn_seconds
        self._shutdown = shutdown_seconds
        self._reported: dict[Key, tuple[float, float]] = {}

    @property
    def patience(self) -> float:
        """Seconds that a tensor may wait before a report is due."""
        return min(self._warn, self._shutdown or self._warn)

    @property
    def interval(self) -> float:
        """Seconds between two reports about one tensor."""
        return self._warn

    def end(self, since: float) -> float:
        """When the job must end because of a tensor that has waited since ``since``; infinite for never."""
        return since + self._shutdown if self._shutdown else math.inf

    def answer(self, pending: Pending, now: float) -> str:
        """The answer to a rank's inquiry: the tensors for which a report is about due; empty if there are none."""
        long = self.patience * (1 - SOON)
        keys = [key for key, waiting in pending.items() if now - waiting.since >= long]
        return f"{_describe(pending, keys, now)}\n  {_REMEDY}" if keys else ""

    def missing(self, pending: Pending, now: float) -> tuple[int, ...]:
        """The missing ranks of the tensors that :meth:`inspect` would report now."""
        expired = self._due(pending, now, self._end_of, self._shutdown)
        return _missing(pending, expired or self._due(pending, now, self._next_report, self._warn))

    def inspect(self, pending: Pending, now: float, found: Sequence[str] = ()) -> Report:
        """The report about ``pending``, all tensors that this rank knows to wait, at the time ``now``.

        ``found`` are texts about the missing ranks, for the report.
        """
        self._reported = {key: last for key, last in self._reported.items() if key in pending}
        expired = self._due(pending, now, self._end_of, self._shutdown)
        if expired:
            text = "\n  ".join([_describe(pending, expired, now), *found, _END.format(self._shutdown)])
            return Report(text, True, _missing(pending, expired), tuple(expired))
        due = self._due(pending, now, self._next_report, self._warn)
        self._reported |= {key: (pending[key].since, now) for key in due}
        if not due:
            return Report()
        return Report("\n  ".join([_describe(pending, due, now), *found, _REMEDY]), keys=tuple(due))

    def deadline(self, pending: Pending) -> float | None:
        """When to inspect next, unless ``pending`` changes before; None when no tensor waits."""
        times = (min(self._next_report(key, waiting), self._end_of(key, waiting)) for key, waiting in pending.items())
        return min(times, default=None)

    def _due(
        self, pending: Pending, now: float, time_of: Callable[[Key, Waiting], float], interval: float
    ) -> list[Key]:
        """The due tensors and, so that one report covers a step, those due soon; empty while none is due."""
        times = {key: time_of(key, waiting) for key, waiting in pending.items()}
        if min(times.values(), default=math.inf) > now:
            return []
        return [key for key, time in times.items() if time <= now + interval * SOON]

    def _next_report(self, key: Key, waiting: Waiting) -> float:
        since, reported = self._reported.get(key, (None, 0.0))
        return (reported if since == waiting.since else waiting.since) + self._warn

    def _end_of(self, _: Key, waiting: Waiting) -> float:
        return self.end(waiting.since)


_REMEDY = (
    "A slow rank will still come. Otherwise the ranks run different code: check that each of them submits the same "
    "names, also under conditions and when it has less data, and look at the output of the missing ranks"
)
_END = "That is longer than HOROVOD_STALL_SHUTDOWN_TIME_SECONDS ({:g}): the job ends"


def _missing(pending: Pending, keys: Sequence[Key]) -> tuple[int, ...]:
    return tuple(sorted({rank for key in keys for rank in pending[key].missing}))


def _describe(pending: Pending, keys: Sequence[Key], now: float) -> str:
    longest = max(now - pending[key].since for key in keys)
    count = "a tensor has" if len(keys) == 1 else f"{len(keys)} tensors have"
    them = "it" if len(keys) == 1 else "them"
    lines = [f"{count} waited, for up to {longest:.0f} s, for ranks that did not submit {them}:"]
    lines += [f"missing {name_ranks(ranks)}: {names}" for ranks, names in _by_rank(pending, keys, now)]
    lines += [text for name in sorted({name for _, name in keys}) for text in _mixed_up(pending, name)]
    return "\n  ".join(lines)


def _by_rank(pending: Pending, keys: Sequence[Key], now: float) -> list[tuple[list[int], str]]:
    """Ranks that miss the same tensors, and these tensors, the longest waiting first."""
    lacking: dict[int, list[Key]] = {}
    for key in sorted(keys, key=lambda key: (pending[key].since, key)):
        for rank in pending[key].missing:
            lacking.setdefault(rank, []).append(key)
    together: dict[tuple[Key, ...], list[int]] = {}
    for rank in sorted(lacking):
        together.setdefault(tuple(lacking[rank]), []).append(rank)
    return [(ranks, _names(pending, lacked, now)) for lacked, ranks in together.items()]


def _names(pending: Pending, keys: Sequence[Key], now: float) -> str:
    shown = [_name(key, pending[key], now) for key in keys[:SHOWN_NAMES]]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _name(key: Key, waiting: Waiting, now: float) -> str:
    process_set, name = key
    where = f" on process set {process_set}" if process_set else ""
    silent = ", and nothing else by the missing ranks" if waiting.silent else ""
    seconds, ranks = now - waiting.since, name_ranks(waiting.submitted)
    return f"{_short(name)}{where} ({seconds:.0f} s, submitted by {ranks}{silent})"


def _short(name: str) -> str:
    return repr(name if len(name) <= SHOWN_CHARACTERS else f"{name[:SHOWN_CHARACTERS]}...")


def _mixed_up(pending: Pending, name: str) -> list[str]:
    """A hint where a rank that is missing on one process set has submitted the same name on another."""
    sets = {process_set: waiting for (process_set, other), waiting in sorted(pending.items()) if other == name}
    missing = {rank for waiting in sets.values() for rank in waiting.missing}
    if len(sets) < 2 or not any(missing.intersection(waiting.submitted) for waiting in sets.values()):
        return []
    submitted = [f"on process set {id} by {name_ranks(waiting.submitted)}" for id, waiting in sets.items()]
    return [f"{_short(name)} was submitted {' and '.join(submitted)}: these ranks call different process sets"]
