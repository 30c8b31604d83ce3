"""Which tensors wait for missing ranks, and the report about them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from collectives.api import CollectiveTimeoutError
from collectives.controller.agreement import name_ranks
from collectives.controller.waits import Key, Pending, ProcessState, Waiting
from collectives.events import EventStream, Stalled
from collectives.logs import about
from collectives.stalls.status import StatusTable

logger = logging.getLogger(__name__)


SHOWN_NAMES = 6
SHOWN_CHARACTERS = 100
SOON = 0.1
"""A report may come early by this part of the time between two reports."""


class StallReport(NamedTuple):
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

    def inspect(self, pending: Pending, now: float, found: Sequence[str] = ()) -> StallReport:
        """The report about ``pending``, all tensors that this rank knows to wait, at the time ``now``.

        ``found`` are texts about the missing ranks, for the report.
        """
        self._reported = {key: last for key, last in self._reported.items() if key in pending}
        expired = self._due(pending, now, self._end_of, self._shutdown)
        if expired:
            text = "\n  ".join([_describe(pending, expired, now), *found, _END.format(self._shutdown)])
            return StallReport(text, True, _missing(pending, expired), tuple(expired))
        due = self._due(pending, now, self._next_report, self._warn)
        self._reported |= {key: (pending[key].since, now) for key in due}
        if not due:
            return StallReport()
        return StallReport("\n  ".join([_describe(pending, due, now), *found, _REMEDY]), keys=tuple(due))

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


States = Callable[[Sequence[int]], Mapping[int, ProcessState]]
"""The states of the processes of ranks, of those that are on this host."""
ANSWER_SECONDS = 1.0
"""A rank that runs has answered within this time. The report does not wait for longer."""


class StatusRequest:
    """For one reporter. ``statuses`` has the questions and the answers.

    ``deadline`` is when :meth:`find` ends at the latest, in monotonic seconds; None where it has not begun.
    """

    def __init__(self, statuses: StatusTable, states: States) -> None:
        self._statuses = statuses
        self._states = states
        self._since: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the present questions end; None where none are open."""
        return None if self._since is None else self._since + ANSWER_SECONDS

    def cleared(self, pending: Pending) -> Pending:
        """As :meth:`StatusTable.cleared`, by the answers to the present questions."""
        return pending if self._since is None else self._statuses.cleared(pending, self._since)

    def find(self, ranks: Sequence[int], now: float) -> list[str] | None:
        """Where ``ranks`` stand, a text for each; None while answers may still come. Without ranks it begins anew."""
        if not ranks:
            self._since = None
            return []
        if self._since is None:
            self._since = now
        since = self._since
        self._statuses.ask(ranks, since)
        if now < since + ANSWER_SECONDS and not self._statuses.is_complete(ranks, since):
            return None
        self._since = None
        return self._statuses.describe(ranks, since, self._states(ranks))


class Observed(Protocol):
    """The object that a reporter inspects."""

    @property
    def is_waiting(self) -> bool:
        """Whether any tensor waits."""

    def waiting(self) -> Pending:
        """The tensors that wait, and the ranks that each waits for."""


class StallReporter:
    """Reports tensors that wait, at planned times, so that a busy job has no cost. Without ``stalls``, never.

    It logs them and publishes them on ``events``. On rank 0, its ``request`` to the missing ranks comes first.
    ``deadline`` is the time of the next look, in monotonic seconds; None
    when no tensor waited at the last one.
    """

    def __init__(
        self, stalls: StallInspector | None, events: EventStream, request: StatusRequest | None = None
    ) -> None:
        self._stalls = stalls
        self._request = request
        self._events = events
        self.deadline: float | None = None

    def look(self, observed: Observed, now: float) -> CollectiveTimeoutError | None:
        """Report waiting tensors of ``observed`` if it is time; returns the error that must end the job, if any."""
        if self.deadline is None:
            if self._stalls is not None and observed.is_waiting:
                self.deadline = now + self._stalls.patience
            return None
        return self._look(observed.waiting(), now) if now >= self.deadline or self._asks_until else None

    def _look(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        fatal = self.report(waiting, now)
        self.deadline = self._next_look(waiting)
        return fatal

    @property
    def _asks_until(self) -> float | None:
        """When the present question ends at the latest; None where there is none now."""
        return None if self._request is None else self._request.deadline

    def _next_look(self, waiting: Pending) -> float | None:
        if self._stalls is None:
            return None
        return self._asks_until or self._stalls.deadline(waiting)

    def report(self, waiting: Pending, now: float) -> CollectiveTimeoutError | None:
        """Report the due tensors of ``waiting``; returns the error that must end the job, if any.

        While answers may still come, the report is still to come.
        """
        if self._stalls is None:
            return None
        if self._request is not None:
            waiting = self._request.cleared(waiting)
        found = self._find(self._stalls, waiting, now)
        report = None if found is None else self._stalls.inspect(waiting, now, found)
        if report is None or report.text is None:
            return None
        if Stalled in self._events.wanted:
            self._publish(waiting, report.keys, now)
        if report.fatal:
            return CollectiveTimeoutError(report.text, report.ranks)
        logger.warning("%s", report.text, extra=about([name for _, name in report.keys]))
        return None

    def _find(self, stalls: StallInspector, waiting: Pending, now: float) -> Sequence[str] | None:
        """Texts about the missing ranks of the due tensors; None while they are still to come."""
        if self._request is None:
            return ()
        return self._request.find(stalls.missing(waiting, now), now)

    def _publish(self, waiting: Pending, keys: Sequence[Key], now: float) -> None:
        for process_set, name in keys:
            tensor = waiting[process_set, name]
            self._events.publish(Stalled(name, process_set, tensor.missing, now - tensor.since, now))

    def note(self, since: Mapping[Key, float], missing: tuple[int, ...], now: float) -> None:
        """Tell observers that rank 0, or this rank in its place, has reported that tensors of this rank wait.

        ``since`` is when each tensor in flight was submitted.
        """
        if self._stalls is None or Stalled not in self._events.wanted:
            return
        waiting = {key: Waiting(time, missing, ()) for key, time in since.items()}
        self._publish(waiting, [key for key in waiting if now - since[key] >= self._stalls.patience], now)

    def answer(self, observed: Observed, now: float) -> str:
        """The answer to a rank's inquiry: the tensors of ``observed`` that have waited for long; empty if none has."""
        return "" if self._stalls is None else self._stalls.answer(observed.waiting(), now)
