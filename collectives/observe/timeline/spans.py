"""The events of one rank -> the records of its lanes. Pure: no clock, no thread, no file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

from collectives.backends.phases import activity, part
from collectives.events import (
    EVERY_KIND,
    Decided,
    Event,
    Failed,
    Finished,
    Heard,
    Phase,
    Stalled,
    Started,
    Straggling,
    Submitted,
    Switched,
)
from collectives.observe.timeline.lanes import JobLane, RankLane, TensorLane
from collectives.observe.timeline.records import (
    JOB,
    MICROSECONDS,
    Draft,
    Moment,
    Record,
    TraceRow,
    quoted,
    rank_row,
    tensor_row,
)

Key = tuple[int, str]

SHOWN_NAMES = 8
SHORTEST = 0.2
"""Microseconds between two events at least, so that their texts differ."""
MOST_LANES = 10_000
"""When there are so many, those of tensors that are not in flight are dropped; the names of a job may never repeat."""


@dataclass(frozen=True, slots=True)
class WorldChange:
    """The ranks of an elastic job have changed: between ``time`` and ``end`` this rank was in no world.

    ``text`` names the ranks that left and came, and ``worker`` is the id of this rank's process.
    """

    round: int
    size: int
    text: str
    time: float
    end: float
    worker: str = ""


class Step(NamedTuple):
    """A step on the way of a rank into its first world."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """This rank, the process ``worker`` of an elastic job, is in its first world at ``end``, after ``steps``."""

    steps: tuple[Step, ...]
    time: float
    end: float
    worker: str = ""


class Spans:
    """Makes records of the events of rank ``rank``, which :meth:`add` expects in the order of their times.

    ``shift`` seconds are added to each time. The owner may change it: time never goes back. With ``mark_cycles``, each
    decision is an instant, as a cycle is in Horovod. ``series`` tells the arrows from those of other timelines in one
    file.
    """

    def __init__(self, rank: int, mark_cycles: bool = False, shift: float = 0.0, series: str = "") -> None:
        self.shift = shift
        self._rank = rank
        self._mark_cycles = mark_cycles
        self._series = f"{crc32(f'{series}{rank}'.encode()):08x}"
        self._records: list[Record] = []
        self._begun: list[Draft] = []
        self._lanes: dict[Key, TensorLane] = {}
        self._row = RankLane(self._draft(rank_row(rank)))
        self._flows = count()
        self._cycle = -1.0
        self._latest = Moment.at(0.0)

    def take(self) -> list[Record]:
        """The records made since the last call."""
        for draft in self._begun:
            draft.finish()
        taken = list(self._records)
        self._records.clear()
        self._begun.clear()
        return taken

    def _draft(self, row: TraceRow) -> Draft:
        return Draft(row, self._begun, self._records)

    def add(self, event: Event | Told) -> None:
        """Make the records of ``event``; a kind without records is ignored."""
        handle = _HANDLERS.get(type(event))
        if handle is not None:
            handle(self, event)

    def drop(self, events: int, time: float) -> None:
        """So many ``events`` are missing before ``time``."""
        self._row.instant("EVENTS_DROPPED", self._moment(time), "p", quoted({"events": events}))

    def close(self, time: float) -> None:
        """End everything that is open, at ``time``."""
        now = self._moment(time)
        for lane in self._lanes.values():
            lane.close(now)
        self._row.close(now)

    def _moment(self, time: float) -> Moment:
        """``time`` in the timeline; behind an earlier event, whose clock may have been corrected since.

        For Perfetto, spans end before others begin at the same time, so a span without length would never end.
        """
        self._latest = Moment.at(max((time + self.shift) * MICROSECONDS, self._latest.microseconds + SHORTEST))
        return self._latest

    def _lane(self, process_set: int, name: str) -> TensorLane:
        key = (process_set, name)
        lane = self._lanes.get(key)
        if lane is None:
            if len(self._lanes) >= MOST_LANES:
                self._lanes = {key: lane for key, lane in self._lanes.items() if not lane.is_idle}
            lane = self._lanes[key] = TensorLane(self._rank, self._draft(tensor_row(name, process_set)))
        return lane

    def _known(self, names: Iterable[str], process_set: int) -> list[TensorLane]:
        return [lane for name in names if (lane := self._lanes.get((process_set, name))) is not None]

    def _submitted(self, event: Submitted) -> None:
        lane, now = self._lane(event.process_set, event.name), self._moment(event.time)
        lane.submit(event, now, f"{self._series}{next(self._flows):08x}")
        self._row.count(event.nbytes, now)

    def _heard(self, event: Heard) -> None:
        self._lane(event.process_set, event.name).hear(event.ranks, self._moment(event.time))

    def _decided(self, event: Decided) -> None:
        now = self._moment(event.time)
        if self._mark_cycles and event.time != self._cycle:
            self._cycle = event.time
            self._row.instant("CYCLE_START", now, "g")
        for lane in self._known(event.names, event.process_set):
            lane.decide(now)

    def _started(self, event: Started) -> None:
        now, name = self._moment(event.time), activity(event.operation, event.backend)
        lanes = [self._lane(event.process_set, name) for name in event.names]
        count, names = len(event.names), _shown(event.names[:SHOWN_NAMES])
        args = f'{{"batch":{event.batch},"bytes":{event.nbytes},"tensors":{count},"names":{names}}}'
        place = self._row.begin(event.batch, name, now, args)
        for lane in lanes:
            lane.start(event.operation.upper(), name, now)
        self._row.arrive([lane.flow for lane in lanes if lane.flow], place, now)
        self._row.show_bytes(now)

    def _phase(self, event: Phase) -> None:
        args = f'{{"batch":{event.batch},"calls":{event.calls},"milliseconds":{event.seconds * 1e3:.3f}}}'
        self._span(part(event.name), event, args)

    def _span(self, name: str, event: Phase | WorldChange, args: str) -> None:
        begin, end = [(time + self.shift) * MICROSECONDS for time in (event.time, event.end)]
        self._row.phase(name, begin, end, args)

    def _arrived(self, event: Arrived) -> None:
        lane = JobLane(self._rank, self._draft(JOB))
        args = {"worker": event.worker} if event.worker else {}
        for name, *times in event.steps:
            begin, end = [(time + self.shift) * MICROSECONDS for time in times]
            lane.step(name, begin, end, quoted(args))

    def _changed(self, event: WorldChange) -> None:
        args = {"round": event.round, "size": event.size, "change": event.text}
        self._span("WORLD_CHANGE", event, quoted({**args, "worker": event.worker}))
        if self._rank == 0:
            self._row.instant("WORLD", self._moment(event.end), "g", quoted(args))

    def _finished(self, event: Finished) -> None:
        now = self._moment(event.time)
        self._row.end(event.batch, now)
        done = sum([lane.finish(now) for lane in self._known(event.names, event.process_set)])
        self._row.count(-done, now, always=True)

    def _failed(self, event: Failed) -> None:
        now = self._moment(event.time)
        lane = self._lane(event.process_set, event.name)
        batch = {} if event.batch is None else {"batch": event.batch}
        lane.instant("FAILED", now, quoted({"error": f"{type(event.error).__name__}: {event.error}", **batch}))
        if event.batch is not None:
            self._row.end(event.batch, now)
        self._row.count(-lane.finish(now), now, always=True)

    def _stalled(self, event: Stalled) -> None:
        lane = self._lane(event.process_set, event.name)
        lane.instant("STALLED", self._moment(event.time), quoted({"missing": event.missing, "seconds": event.seconds}))

    def _straggling(self, event: Straggling) -> None:
        args = {**event.straggler.as_dict(), "is_over": event.is_over}
        self._row.instant("STRAGGLER", self._moment(event.time), "g", quoted(args))

    def _switched(self, event: Switched) -> None:
        given = event.parameters
        args = {name: getattr(given, name) for name in type(given).__dataclass_fields__}
        self._row.instant("PARAMETERS", self._moment(event.time), "t", quoted({"batch": event.batch, **args}))


Told: TypeAlias = WorldChange | Arrived
"""The events outside of an engine."""
_HANDLERS: dict[type, Callable[[Spans, Any], None]] = {
    Submitted: Spans._submitted,
    Heard: Spans._heard,
    Decided: Spans._decided,
    Started: Spans._started,
    Phase: Spans._phase,
    Finished: Spans._finished,
    Failed: Spans._failed,
    Stalled: Spans._stalled,
    Straggling: Spans._straggling,
    Switched: Spans._switched,
    WorldChange: Spans._changed,
    Arrived: Spans._arrived,
}
KINDS = EVERY_KIND.intersection(_HANDLERS)
"""The events that have records."""


@lru_cache(1024)
def _shown(names: tuple[str, ...]) -> str:
    return quoted(names)
