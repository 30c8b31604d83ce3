"""A timeline: hears the events of an engine, and lets a thread of its own make records of them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from collectives.events import Event, EventStream, Phase
from collectives.observe.timeline.document import DocumentError, NoDocumentError
from collectives.observe.timeline.records import Record
from collectives.observe.timeline.spans import KINDS, Arrived, Spans, Told, WorldChange

logger = logging.getLogger(__name__)


def give_way() -> None:
    """Let this thread interrupt no other one when it wakes up: it gets its share of a core a little later.

    With as many ranks as cores, an interrupted rank holds up all others. Where a sandbox forbids it, nothing changes.
    """
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0 is the calling thread


FLUSH_SECONDS = 0.08
"""The time between two writes. They are at multiples of it in the timeline: ranks that write together hold up a step
of the training once, and not once each."""
LATE_SECONDS = 0.01
"""Threads publish their events a moment after they happened: younger events wait for the next write."""
CLOSE_SECONDS = 5.0
MOST_EVENTS = 200_000
"""Events that may wait for the thread; more are dropped, and counted."""
EVENTS_AT_ONCE = 32
"""After so many events the thread lets others have the interpreter."""


class RecordSink(Protocol):
    """Where the records of a rank go. ``shift`` is added to the monotonic time of this rank, in seconds.

    ``ended``: whether the other end wants no more records.
    """

    shift: float
    ended: bool

    @property
    def is_ready(self) -> bool:
        """Whether records can be taken now; until then, events wait."""

    def write(self, records: list[Record]) -> None:
        """Take ``records``; raises DocumentError where no more can be taken."""

    def close(self) -> None:
        """No more records will come; raises DocumentError where the last ones cannot be taken."""

    def disown(self) -> None:
        """In a forked child: close this copy of what the sink has open."""


class Timeline:
    """Records the events of rank ``rank`` into the sink that ``open_sink`` returns on the thread of the timeline.

    ``open_sink`` gets a function that says whether it shall give up, because the timeline is closed. ``series`` tells
    its arrows from those of others in one file. A sink that fails is logged, once, and ends the recording. All methods
    may be called from any thread.
    """

    def __init__(
        self,
        rank: int,
        open_sink: Callable[[Callable[[], bool]], RecordSink],
        mark_cycles: bool = False,
        series: str = "",
    ) -> None:
        self._spans = Spans(rank, mark_cycles, series=series)
        self._open_sink = open_sink
        self._sink: RecordSink | None = None
        self._events: deque[Event | Told] = deque()
        self._dropped = 0
        self._told = False
        self._detach: Callable[[], None] | None = None
        # Owned by the timeline; set by close(), after which the thread writes what is left and ends.
        self._closing = threading.Event()
        # Owned by the timeline, joined by close() for CLOSE_SECONDS; it wakes up every FLUSH_SECONDS.
        self._thread = threading.Thread(target=self._run, name="hvd-timeline", daemon=True)
        self._thread.start()

    def attach(self, events: EventStream) -> None:
        """Hear ``events`` from now on, and those of no other engine."""
        self.detach()
        self._detach = events.subscribe(self._hear, KINDS)

    def detach(self) -> None:
        """Hear no events."""
        detach, self._detach = self._detach, None
        if detach is not None:
            detach()

    @property
    def is_recording(self) -> bool:
        """Whether the thread still takes events."""
        return self._thread.is_alive() and not self._closing.is_set()

    def tell(self, told: Told) -> None:
        """Something happened outside of the engine."""
        self._hear(told)

    def _hear(self, event: Event | Told) -> None:
        if len(self._events) < MOST_EVENTS:
            self._events.append(event)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write what has happened up to now, and end. Idempotent."""
        self.detach()
        self._closing.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.warning("the timeline is not complete: its file could not be written within %g s", CLOSE_SECONDS)

    def disown(self) -> None:
        """In a forked child, which has no thread: close this copy of the file."""
        if self._sink is not None:
            self._sink.disown()

    # On the thread of the timeline.

    def _run(self) -> None:
        give_way()
        try:
            self._sink = sink = self._open_sink(self._closing.is_set)
            try:
                self._record(sink)
            finally:
                sink.close()
        except DocumentError as error:
            if self._sink is not None or not self._closing.is_set():  # or it was closed while it connected
                level = logging.INFO if isinstance(error, NoDocumentError) else logging.WARNING
                logger.log(level, "%s; training goes on without a timeline", error)
        except Exception:
            logger.exception("the timeline failed; training goes on without it")
        finally:
            self.detach()
            self._events.clear()

    def _record(self, sink: RecordSink) -> None:
        while not self._closing.wait(_rest(sink)) and not sink.ended:
            if sink.is_ready:
                self._pass_on(sink, time.monotonic() - LATE_SECONDS)
        self.detach()
        now = time.monotonic()
        self._pass_on(sink, now)
        self._spans.close(now)
        sink.write(self._spans.take())

    def _pass_on(self, sink: RecordSink, until: float) -> None:
        self._spans.shift = sink.shift
        for number, event in enumerate(self._taken(until)):
            self._spans.add(event)
            if number % EVENTS_AT_ONCE == EVENTS_AT_ONCE - 1:
                time.sleep(0)
        self._tell_dropped()
        sink.write(self._spans.take())

    def _taken(self, until: float) -> list[Event | Told]:
        """The events that happened before ``until``, in the order of their times."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        events.sort(key=_published_at)
        late = len(events)
        while late and _published_at(events[late - 1]) > until:
            late -= 1
        self._events.extendleft(reversed(events[late:]))
        return events[:late]

    def _tell_dropped(self) -> None:
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            self._spans.drop(dropped, time.monotonic())
            if not self._told:
                self._told = True
                logger.warning("the timeline is not complete: events come faster than they can be written")


def _rest(sink: RecordSink) -> float:
    """The seconds until the next write; with another clock than that of rank 0 it is at about the same time."""
    return FLUSH_SECONDS - (time.monotonic() + sink.shift) % FLUSH_SECONDS


def _published_at(event: Event | Told) -> float:
    return event.end if isinstance(event, Phase | WorldChange | Arrived) else event.time
