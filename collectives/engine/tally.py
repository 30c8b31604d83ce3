"""Counts what the batches of this rank do, and for how long they wait for other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from time import monotonic

from collectives.api import Operation
from collectives.backends.base import Backend
from collectives.counts import SetCounts
from collectives.engine.work import Work
from collectives.parameters import Parameters
from collectives.planning.messages import WaitReport
from collectives.planning.stragglers import Totals, WaitWindows
from collectives.planning.worker import Batch

__all__ = ["Tally"]

LONG_SECONDS = 0.001
"""A wait that counts as one."""
BARRIER = Operation.BARRIER  # a look-up in an Enum takes longer than the rest of its line


class _SetTally:
    """The numbers of :class:`SetCounts`, which grow."""

    __slots__ = ("backend", "batches", "capacity", "failures", "inside", "late", "nbytes", "operations", "waits")

    def __init__(self) -> None:
        self.operations: defaultdict[Operation, int] = defaultdict(int)
        self.nbytes = self.batches = self.capacity = self.waits = self.failures = 0
        self.late = self.inside = self.backend = 0.0

    def counts(self, introduced: int) -> SetCounts:
        operations = {operation.value: count for operation, count in list(self.operations.items())}
        return SetCounts(
            operations,
            self.nbytes,
            self.batches,
            self.capacity,
            self.late,
            self.inside,
            self.backend,
            self.waits,
            introduced,
            self.failures,
        )


class Tally:
    """``report`` gets the waits of each window in which ``windows`` finds any. For the thread that drives.

    A batch that was negotiated waits from the submission of its last tensor, or the end of the batch before, to the
    decision to run it, if a caller waits. One in unison waits in its backend. :meth:`counts` is for any thread.
    """

    def __init__(self, windows: WaitWindows, report: Callable[[WaitReport], None]) -> None:
        self._windows = windows
        self._report = report
        self._sets: dict[int, _SetTally] = {}
        self._decided: dict[int, float] = {}
        self._kept: dict[int, tuple[float, float]] = {}
        self._begun = self.ended = monotonic()
        """``ended`` is when the last batch was over, in monotonic seconds."""
        self._late = 0.0
        self.batch: int | None = None
        """The number of the last batch that has ended on this rank."""

    def decided(self, batches: Iterable[Batch]) -> None:
        """``batches`` will run."""
        now = monotonic()
        for batch in batches:
            self._decided[batch.id] = now

    def drop(self, batch: int) -> None:
        """The decided ``batch`` runs on no backend."""
        self._decided.pop(batch, None)

    def begin(self, batch: int, works: Sequence[Work], backend: Backend) -> None:
        """The decided ``batch`` begins."""
        backend.waited()  # in a trial that did not run; that time is before the decision
        decided, now = self._decided.pop(batch, 0.0), monotonic()
        self._begun, self._late = now, 0.0
        if any([work.urged for work in works]):
            self._late = max(0.0, decided - max(self.ended, *[work.since for work in works]))

    def begin_trial(self) -> None:
        """A batch begins that may run in unison."""
        self._begun, self._late = monotonic(), 0.0

    def keep(self, batch: int) -> None:
        """``batch`` has begun, and ends after others have begun."""
        self._kept[batch] = self._begun, self._late

    def end(self, batch: int, works: Sequence[Work], backend: Backend, parameters: Parameters | None) -> None:
        """``batch`` is over; it has run on ``backend``."""
        begun, decision = self._begun, self._late
        if self._kept:
            begun, decision = self._kept.pop(batch, (begun, decision))
        waited, inside = backend.waited()
        late, now = decision + waited, monotonic()
        request, count = works[0].request, len(works)
        tally = self._sets.get(request.process_set) or self._open(request.process_set)
        tally.operations[request.operation] += count
        tally.batches += 1
        if request.operation is not BARRIER:
            tally.nbytes += request.nbytes if count == 1 else sum([work.request.nbytes for work in works])
            tally.capacity += parameters.fusion_threshold if parameters is not None else 0
        tally.late += late
        tally.inside += inside
        tally.backend += now - begun - waited - inside
        if late + inside >= LONG_SECONDS:
            tally.waits += 1
        self._begun = self.ended = now
        self._late = 0.0
        self.batch = batch
        if now >= self._windows.due:
            self._close(now)

    def _open(self, process_set: int) -> _SetTally:
        return self._sets.setdefault(process_set, _SetTally())

    def _close(self, now: float) -> None:
        totals = {id: Totals(each.late, each.inside, each.waits) for id, each in self._sets.items()}
        report = self._windows.close(totals, now)
        if report is not None:
            self._report(report)

    def failed(self, process_set: int) -> None:
        """A tensor ended with an error."""
        tally = self._sets.get(process_set) or self._open(process_set)
        tally.failures += 1

    def counts(self, introduced: Callable[[int], int]) -> dict[int, SetCounts]:
        """The numbers of each process set; ``introduced`` returns those of whole requests."""
        return {id: tally.counts(introduced(id)) for id, tally in list(self._sets.items())}
