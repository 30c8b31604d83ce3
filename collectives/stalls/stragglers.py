"""Pure: the ranks that others wait for, from reports of all ranks about their own waits.

In a bypass no rank hears when another one submits, so each knows only how long it waited itself. The rank that is
waited for is the one that does not wait.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from collectives.controller.messages import WaitReport, Waits

WINDOW_SECONDS = 0.25
"""The shortest window of a report."""
RANKS_AT_ONCE = 64
"""Where there are more ranks, the windows are longer: rank 0 gets the same number of reports a second."""
NOTEWORTHY_SHARE = 0.02
TRAILING_REPORTS = 4
"""A rank that waits no more still reports so often, which clears the rank that it waited for."""
EXPLAINING_PART = 0.5
"""A rank is late because it has no core if it waits for one longer than the others do, by so much of their waits."""
SIGNIFICANT_SECONDS = 0.025
SIGNIFICANT_SHARE = 0.02
"""The others wait for a straggler for so long in a window, or for this share of a longer one."""
EXCUSE = 4.0
"""A rank that waits itself is late by chance, or because of others: its own waits count so many times in its favour."""
USUAL_TIMES = 2.5
"""A straggler makes the others wait so many times longer than it usually waits itself: where ranks are often late by
chance, each of them waits, too."""
MEMORY_SECONDS = 20.0
MOST_EVIDENCE = 4.0
ENOUGH_EVIDENCE = 10.0
LARGEST_SCORE = 12.0


class Cause(enum.Enum):
    """Why others wait for a rank, as far as their waits show it."""

    LATE = "late submission"
    BACKEND = "slow backend"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Straggler:
    """The other ranks of ``process_set`` wait for ``rank``: ``seconds`` each time, which is ``share`` of their time.

    A rank that is stopped has been silent for ``seconds``. For ``queued``, a share of its own time, the main thread of
    the rank could have run but had no core; 0 where the system does not tell. ``queued_more`` is what is left of it
    without the usual one of the others.
    """

    rank: int
    process_set: int
    cause: Cause
    seconds: float
    share: float
    queued: float = 0.0
    queued_more: float = 0.0

    @property
    def lacks_cores(self) -> bool:
        """Whether it is other work on its cores that makes the rank slow, and not the rank itself."""
        return self.queued_more > 0 and self.queued_more >= EXPLAINING_PART * self.share

    @property
    def all_lack_cores(self) -> bool:
        """Whether the rank waits for a core as long as others wait for it, and the others wait hardly less for theirs.

        Then it is late by chance, or for a reason of its own: the waits do not tell.
        """
        return not self.lacks_cores and self.queued >= self.share > 0

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "rank": self.rank,
            "process_set": self.process_set,
            "cause": self.cause.value,
            "seconds": self.seconds,
            "share": self.share,
            "queued": self.queued,
            "lacks_cores": self.lacks_cores,
        }


class StragglerChange(NamedTuple):
    """``straggler`` is one from now on, or no longer."""

    straggler: Straggler
    is_over: bool


class Totals(NamedTuple):
    """Seconds that a rank has waited for a process set until all were there, and inside; in so many batches."""

    late: float
    inside: float
    times: int


class WaitWindows:
    """Cuts the time of a rank of ``size`` into windows. ``due`` is when the present one may end.

    The first window begins with the first call of :meth:`close`.
    """

    def __init__(self, size: int) -> None:
        self.due = 0.0
        self._seconds = window_seconds(size)
        self._begun: float | None = None
        self._before: dict[int, Totals] = {}
        self._queued_before = 0.0
        self._trailing = 0

    def close(self, totals: Mapping[int, Totals], now: float, queued: float = 0.0) -> WaitReport | None:
        """The report about the window that ends ``now``; None where nobody needs it.

        ``totals`` are by process set. ``queued`` is how long this rank has waited for a core, in seconds, like the
        totals since the rank has begun.
        """
        begun, before, queued_before = self._begun, self._before, self._queued_before
        self._begun, self._before, self._queued_before, self.due = now, dict(totals), queued, now + self._seconds
        if begun is None or now <= begun:
            return None
        waits = [_difference(id, after, before.get(id, Totals(0.0, 0.0, 0))) for id, after in totals.items()]
        least = NOTEWORTHY_SHARE * (now - begun)
        noteworthy = tuple([each for each in waits if each.late + each.inside >= least])
        lacking = max(0.0, queued - queued_before)
        if noteworthy or lacking >= least:
            self._trailing = TRAILING_REPORTS
        elif not self._trailing:
            return None
        else:
            self._trailing -= 1
        return WaitReport(now - begun, noteworthy, lacking)


def _difference(process_set: int, after: Totals, before: Totals) -> Waits:
    return Waits(process_set, after.late - before.late, after.inside - before.inside, after.times - before.times)


def window_seconds(size: int) -> float:
    """The shortest window of each of ``size`` ranks."""
    return WINDOW_SECONDS * max(1.0, size / RANKS_AT_ONCE)


def laggards(waits: Mapping[int, float]) -> tuple[frozenset[int], float]:
    """The ranks that wait clearly less than the others, at most half of all, and the median wait of the others.

    The widest gap between the sorted waits separates them; there are none if it is less than half of that median.
    """
    order = sorted(waits, key=lambda rank: waits[rank])
    gaps = [(waits[order[place]] - waits[order[place - 1]], place) for place in range(1, len(order) // 2 + 1)]
    if not gaps:
        return frozenset(), 0.0
    gap, place = max(gaps)
    wait = median([waits[rank] for rank in order[place:]])
    return (frozenset(order[:place]), wait) if gap > wait / 2 else (frozenset(), 0.0)


class _Usual:
    """How long a rank usually waits each time, over about MEMORY_SECONDS; 0 in a window in which it never does.

    So a few waits, such as those at the start of a job, excuse it for a few windows only.
    """

    __slots__ = ("_at", "_reports", "_seconds")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at = 0.0
        self._reports = 0

    def add(self, report: WaitReport, now: float) -> None:
        self._reports += 1
        weight = max(1.0 / self._reports, -math.expm1((self._at - now) / MEMORY_SECONDS))
        times = sum([each.times for each in report.waits])
        latest = sum([each.late + each.inside for each in report.waits]) / max(1, times)
        self._seconds, self._at = (1.0 - weight) * self._seconds + weight * latest, now

    def seconds(self, now: float) -> float:
        return self._seconds * math.exp((self._at - now) / MEMORY_SECONDS)


class _Score:
    """The evidence against one rank for one cause, and when the last of it came.

    ``queued`` has the shares of the rank and of the others in which they waited for a core, for each window with
    evidence, until the rank is named.
    """

    __slots__ = ("at", "named", "queued", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self.queued: list[tuple[float, float]] = []
        self.at = float("-inf")
        self.named: Straggler | None = None


Key = tuple[int, int, Cause]


class StragglerInspector:
    """Judges the reports of ``size`` ranks. ``members`` returns the ranks of a process set, none for an unknown one.

    A rank is named when evidence from several windows has added up. A window in which it is not clearly the one that
    the others wait for takes evidence away, so chance does not add up. Reports count when almost all ranks have sent
    theirs, or after the shortest window.
    """

    def __init__(self, size: int, members: Callable[[int], Sequence[int]]) -> None:
        self._members = members
        self._spacing = 0.8 * window_seconds(size)
        self._almost_all = max(1, size - 1 - size // 8)
        self._fresh: set[int] = set()
        self._fresh_since = 0.0
        self._reports: dict[int, WaitReport] = {}
        self._scores: dict[Key, _Score] = {}
        self._stopped: dict[int, Straggler] = {}
        self._usual: dict[int, _Usual] = {}

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """The present ones."""
        named = [score.named for score in list(self._scores.values()) if score.named is not None]
        return (*list(self._stopped.values()), *named)

    def hear(self, rank: int, report: WaitReport, now: float) -> list[StragglerChange]:
        """``rank`` reports; returns the new stragglers, and those that have ceased to be."""
        if report.seconds <= 0:
            return []
        self._reports[rank] = report
        if not self.stragglers:  # which explain the waits
            self._usual.setdefault(rank, _Usual()).add(report, now)
        changes = self.answered(rank)
        if not self._fresh:
            self._fresh_since = now
        self._fresh.add(rank)
        if len(self._fresh) >= self._almost_all or now >= self._fresh_since + self._spacing:
            fresh, self._fresh = self._fresh, set()
            changes += self._judge_all(fresh, now)
        return changes

    def answered(self, rank: int) -> list[StragglerChange]:
        """A message came from ``rank``: it is not stopped, or no longer. Others may be."""
        stopped = self._stopped.pop(rank, None)
        return [] if stopped is None else [StragglerChange(stopped, True)]

    def _judge_all(self, fresh: Collection[int], now: float) -> Iterator[StragglerChange]:
        reported = {waits.process_set for rank in fresh for waits in self._reports[rank].waits}
        for process_set in sorted(reported | {process_set for process_set, _, _ in self._scores}):
            members = self._members(process_set)
            window = max([self._reports[rank].seconds for rank in members if rank in fresh], default=0.0)
            if window:
                for cause in (Cause.LATE, Cause.BACKEND):
                    yield from self._judge(process_set, members, cause, window, now)

    def silent(self, ranks: Sequence[int], seconds: float) -> list[StragglerChange]:
        """``ranks`` have not answered for so many ``seconds``."""
        new = {rank: Straggler(rank, 0, Cause.STOPPED, seconds, 1.0) for rank in ranks if rank not in self._stopped}
        self._stopped |= new
        return [StragglerChange(straggler, False) for straggler in new.values()]

    def _judge(
        self, process_set: int, members: Sequence[int], cause: Cause, window: float, now: float
    ) -> Iterator[StragglerChange]:
        waits = {rank: self._share(rank, process_set, cause) for rank in members}
        slow, wait = laggards(waits)
        significant = max(SIGNIFICANT_SECONDS / window, SIGNIFICANT_SHARE)
        for rank in members:
            if rank in slow and wait > significant and self._is_unusual(rank, process_set, cause, now):
                excuse = self._excuse(rank, process_set, cause)
                evidence = max(-MOST_EVIDENCE, min((wait - EXCUSE * excuse) / significant - 1.0, MOST_EVIDENCE))
            else:
                evidence = -MOST_EVIDENCE
            yield from self._add((process_set, rank, cause), evidence, wait, now)

    def _add(self, key: Key, evidence: float, share: float, now: float) -> Iterator[StragglerChange]:
        score = self._scores.get(key)
        if score is None:
            if evidence <= 0:
                return
            score = self._scores[key] = _Score()
        if now < score.at + self._spacing:
            return
        process_set, rank, cause = key
        score.at, score.value = now, min(score.value + evidence, LARGEST_SCORE)
        if evidence > 0 and score.named is None:
            score.queued.append(self._queued_shares(rank, process_set))
        if score.value <= 0:
            del self._scores[key]
            if score.named is not None:
                yield StragglerChange(score.named, True)
        elif score.value >= ENOUGH_EVIDENCE and score.named is None:
            each_time = self._each_time(rank, process_set, cause)
            own, usual = [fmean(shares) for shares in zip(*score.queued, strict=True)]
            score.named = Straggler(rank, process_set, cause, each_time, share, own, max(0.0, own - usual))
            yield StragglerChange(score.named, False)

    def _share(self, rank: int, process_set: int, cause: Cause) -> float:
        report = self._reports.get(rank)
        if report is None:
            return 0.0
        waits = [each for each in report.waits if each.process_set == process_set]
        return sum([_seconds(each, cause) for each in waits]) / report.seconds

    def _excuse(self, rank: int, process_set: int, cause: Cause) -> float:
        """The share of its time in which ``rank`` waits itself: a rank that waits in one set comes late in another."""
        report = self._reports.get(rank)
        if report is None:
            return 0.0
        own = [
            _seconds(each, cause) if each.process_set == process_set else each.late + each.inside
            for each in report.waits
        ]
        return sum(own) / report.seconds

    def _queued_shares(self, rank: int, process_set: int) -> tuple[float, float]:
        """The share of its time in which ``rank`` waits for a core, and the median one of the others in the set."""
        reports = {member: self._reports.get(member) for member in self._members(process_set)}
        shares = {member: report.queued / report.seconds if report else 0.0 for member, report in reports.items()}
        own = shares.pop(rank)
        return own, median(shares.values())

    def _is_unusual(self, rank: int, process_set: int, cause: Cause, now: float) -> bool:
        usual = self._usual.get(rank)
        return usual is None or self._each_time(rank, process_set, cause) > USUAL_TIMES * usual.seconds(now)

    def _each_time(self, rank: int, process_set: int, cause: Cause) -> float:
        """The wait of the others in each batch in which they wait, on average over the last windows."""
        others = [self._reports.get(other) for other in self._members(process_set) if other != rank]
        waits = [each for report in others if report for each in report.waits if each.process_set == process_set]
        times = sum([each.times for each in waits])
        return sum([_seconds(each, cause) for each in waits]) / times if times else 0.0


def _seconds(waits: Waits, cause: Cause) -> float:
    return waits.late if cause is Cause.LATE else waits.inside
