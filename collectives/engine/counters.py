"""Counts what the batches of this rank do, and how long they wait for other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from collectives.api import Operation, Parameters
from collectives.cores import queued_seconds
from collectives.stalls.stragglers import Totals, WaitWindows

if TYPE_CHECKING:  # the driver reads counts, and needs no backend
    from collectives.backends.base import Backend
    from collectives.controller.messages import WaitReport
    from collectives.controller.worker import Batch
    from collectives.engine.work import Work


@dataclass(frozen=True, slots=True)
class SetCounts:
    """The work of one rank for one process set.

    ``operations`` counts tensors by operation, such as "allreduce", and ``bytes`` are theirs on this rank. They ran in
    ``batches``, which could have held ``capacity`` bytes, that is the fusion threshold for each. ``late_seconds`` is
    how long this rank waited until all ranks had submitted a batch, ``inside_seconds`` how long it waited for them
    inside operations, as far as the backend can tell, and ``backend_seconds`` the rest of the time in the backend.
    ``waits`` counts the batches that waited for a millisecond or longer. ``introduced`` requests went to the
    coordinator in full; it knew the others by their number, or was not asked. ``failures`` counts tensors that ended
    with an error.
    """

    operations: Mapping[str, int] = field(default_factory=dict)
    bytes: int = 0
    batches: int = 0
    capacity: int = 0
    late_seconds: float = 0.0
    inside_seconds: float = 0.0
    backend_seconds: float = 0.0
    waits: int = 0
    introduced: int = 0
    failures: int = 0

    @property
    def tensors(self) -> int:
        """The number of operations of all kinds."""
        return sum(self.operations.values())

    @property
    def waiting_seconds(self) -> float:
        """How long this rank waited for others."""
        return self.late_seconds + self.inside_seconds

    @property
    def tensors_per_batch(self) -> float:
        """How many tensors travel together, on average; 0 before the first batch."""
        return self.tensors / self.batches if self.batches else 0.0

    @property
    def fusion_fill(self) -> float:
        """The part of the fusion threshold that the average batch fills; 0 without fusion."""
        return self.bytes / self.capacity if self.capacity else 0.0

    @property
    def cache_hits(self) -> int:
        """The tensors whose request did not travel in full."""
        return max(0, self.tensors - self.introduced)

    def __add__(self, other: SetCounts) -> SetCounts:
        names = self.operations.keys() | other.operations.keys()
        operations = {name: self.operations.get(name, 0) + other.operations.get(name, 0) for name in sorted(names)}
        return SetCounts(operations, *(getattr(self, name) + getattr(other, name) for name in _SUMS))

    def as_dict(self) -> dict[str, Any]:
        """All numbers, those that are computed included, for JSON."""
        return asdict(self) | {name: getattr(self, name) for name in _COMPUTED}


_SUMS = tuple(name for name in SetCounts.__dataclass_fields__ if name != "operations")
_COMPUTED = ("tensors", "waiting_seconds", "tensors_per_batch", "fusion_fill", "cache_hits")


@dataclass(frozen=True, slots=True)
class Counts:
    """The work of one rank: ``sets`` by the id of the process set, and the control messages between ranks."""

    sets: Mapping[int, SetCounts] = field(default_factory=dict)
    messages_sent: int = 0
    messages_received: int = 0

    def __add__(self, other: Counts) -> Counts:
        ids = sorted(self.sets.keys() | other.sets.keys())
        none = SetCounts()
        return Counts(
            {id: self.sets.get(id, none) + other.sets.get(id, none) for id in ids},
            self.messages_sent + other.messages_sent,
            self.messages_received + other.messages_received,
        )


NO_COUNTS = Counts()


LONG_SECONDS = 0.001
"""A wait that counts as one."""
BARRIER = Operation.BARRIER  # a look-up in an Enum takes longer than the rest of its line


class _SetCounters:
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


class Counters:
    """``report`` gets the waits of each window in which ``windows`` finds any. For the thread that drives.

    A batch that was negotiated waits from the submission of its last tensor, or the end of the batch before, to the
    decision to run it, if a caller waits. One that bypasses the coordinator waits in its backend. :meth:`counts` is for
    any thread.
    """

    def __init__(self, windows: WaitWindows, report: Callable[[WaitReport], None]) -> None:
        self._windows = windows
        self._report = report
        self._sets: dict[int, _SetCounters] = {}
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
        backend.waited()  # in an attempt that did not run; that time is before the decision
        decided, now = self._decided.pop(batch, 0.0), monotonic()
        self._begun, self._late = now, 0.0
        if any([work.urged for work in works]):
            self._late = max(0.0, decided - max(self.ended, *[work.since for work in works]))

    def begin_attempt(self) -> None:
        """A batch begins that runs if all ranks attempt it."""
        self._begun, self._late = monotonic(), 0.0

    def keep(self, batch: int) -> None:
        """``batch`` has begun, and ends after others have begun."""
        self._kept[batch] = self._begun, self._late

    def end(self, batch: int, works: Sequence[Work], backend: Backend, parameters: Parameters) -> None:
        """``batch`` is over; it has run on ``backend``."""
        begun, decision = self._begun, self._late
        if self._kept:
            begun, decision = self._kept.pop(batch, (begun, decision))
        waited, inside = backend.waited()
        late, now = decision + waited, monotonic()
        request, count = works[0].request, len(works)
        counters = self._sets.get(request.process_set) or self._open(request.process_set)
        counters.operations[request.operation] += count
        counters.batches += 1
        if request.operation is not BARRIER:
            counters.nbytes += request.nbytes if count == 1 else sum([work.request.nbytes for work in works])
            counters.capacity += parameters.fusion_threshold
        counters.late += late
        counters.inside += inside
        counters.backend += now - begun - waited - inside
        if late + inside >= LONG_SECONDS:
            counters.waits += 1
        self._begun = self.ended = now
        self._late = 0.0
        self.batch = batch
        if now >= self._windows.due:
            self._close(now)

    def _open(self, process_set: int) -> _SetCounters:
        return self._sets.setdefault(process_set, _SetCounters())

    def _close(self, now: float) -> None:
        totals = {id: Totals(each.late, each.inside, each.waits) for id, each in self._sets.items()}
        report = self._windows.close(totals, now, queued_seconds())
        if report is not None:
            self._report(report)

    def failed(self, process_set: int) -> None:
        """A tensor ended with an error."""
        counters = self._sets.get(process_set) or self._open(process_set)
        counters.failures += 1

    def counts(self, introduced: Callable[[int], int]) -> dict[int, SetCounts]:
        """The numbers of each process set; ``introduced`` returns those of whole requests."""
        return {id: counters.counts(introduced(id)) for id, counters in list(self._sets.items())}
