"""The timeline of a process, from one engine to the next."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from collectives.api import World
from collectives.engine.engine import Engine
from collectives.engine.start import own_address
from collectives.net.attempts import attempts
from collectives.observe.timeline.address import TimelineAddress
from collectives.observe.timeline.document import Document, DocumentError, DocumentInUseError, opened
from collectives.observe.timeline.gathering import Gathering
from collectives.observe.timeline.records import Record
from collectives.observe.timeline.sending import Sender
from collectives.observe.timeline.spans import Arrived, Step, WorldChange
from collectives.observe.timeline.timeline import RecordSink, Timeline
from collectives.settings import Settings

logger = logging.getLogger(__name__)

HELD_SECONDS = 10.0
"""How long a new rank 0 waits, on the thread of the timeline, for the file that a lost one may still hold."""


class Recorder:
    """At most one timeline at a time. For one thread at a time."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._rendezvous: TimelineAddress | None = None
        self._timeline: Timeline | None = None
        self._recorded = ("", False)
        self._left: float | None = None
        self._round = self._count = 0
        self._is_changing = False
        self._continued: tuple[str, bool] | None = None

    def follow(
        self,
        engine: Engine,
        world: World,
        settings: Settings,
        reason: str = "",
        steps: Sequence[Step] = (),
        worker: str = "",
    ) -> None:
        """``engine`` runs in ``world``: record it, if ``settings`` say so, or if the world before was recorded.

        ``reason`` says how the ranks have changed. ``steps`` led this process into its first world, in seconds since
        the epoch. ``worker`` is its id in an elastic job.
        """
        self._engine, self._round = engine, world.round
        world = replace(world, topology=engine.topology)
        self._rendezvous = (
            TimelineAddress(world, settings, own_address(world, settings)) if engine.topology.size > 1 else None
        )
        given = (settings.timeline, settings.timeline_mark_cycles) if settings.timeline else None
        wanted, self._continued = self._continued if self._is_changing else given, None
        if wanted is not None:
            begun = min([step.begin for step in steps], default=math.inf)
            self._begin(*wanted, resumes=self._left is not None, begun=begun)
        if steps and self._timeline is not None:
            self._timeline.tell(_arrived(steps, worker))
        if self._is_changing and self._timeline is not None and self._left is not None:
            change = WorldChange(world.round, engine.topology.size, reason, self._left, time.monotonic(), worker)
            self._timeline.tell(change)
        self._is_changing = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Begin a recording into the file ``path`` of rank 0; the present recording ends.

        Goes on if that is recorded already. A file that cannot be written is logged.
        """
        if not (self.is_recording and _absolute(path) == self._recorded[0]):
            self._begin(path, mark_cycles, resumes=False)

    def _begin(self, path: str, mark_cycles: bool, resumes: bool, begun: float = math.inf) -> None:
        self.stop()
        if self._engine is None:
            return
        rank = self._engine.topology.rank
        try:
            opener = self._opener(rank, path, resumes, begun)
        except DocumentError as error:
            logger.warning("%s; training goes on without a timeline", error)
            return
        self._recorded = _absolute(path), mark_cycles
        self._count += 1
        self._timeline = Timeline(rank, opener, mark_cycles and rank == 0, f"{self._round}.{self._count}.")
        self._timeline.attach(self._engine.events)

    def _opener(self, rank: int, path: str, resumes: bool, begun: float) -> Callable[[Callable[[], bool]], RecordSink]:
        """The thread of the timeline reads a file that goes on: it may be large, and the other ranks wait."""
        rendezvous = self._rendezvous
        if rank > 0 and rendezvous is not None:
            return partial(Sender, rendezvous)
        try:
            file = opened(path)
        except DocumentInUseError:
            if not resumes:
                raise
            return lambda is_closed: _sink(_continued(path, begun, is_closed), rendezvous)
        return lambda _: _sink(Document(path, resumes, begun, file), rendezvous)

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded."""
        return self._timeline is not None and self._timeline.is_recording

    @property
    def path(self) -> str:
        """The file that is recorded into; empty if nothing is recorded."""
        return self._recorded[0] if self.is_recording else ""

    def leave(self, goes_on: bool = False) -> None:
        """The engine has ended, and with it its timeline, which ``goes_on`` in the next world of the job."""
        if self._engine is None:
            return
        cut_off = self._engine.cut_off_since
        self._left = time.monotonic() if cut_off is None else cut_off
        self._is_changing = goes_on
        self._continued = self._recorded if goes_on and self._timeline is not None else None
        self.stop()
        self._engine = self._rendezvous = None

    def stop(self) -> None:
        """Complete the file. Does nothing if nothing is recorded."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()

    def disown(self) -> None:
        """In a forked child: the timeline is the parent's. Takes no lock."""
        timeline, self._timeline = self._timeline, None
        self._engine = self._rendezvous = None
        if timeline is not None:
            timeline.disown()


def _arrived(steps: Sequence[Step], worker: str) -> Arrived:
    """``steps`` on the monotonic clock, as far as the clock of the launcher agrees with that of this host."""
    epoch = time.time() - time.monotonic()
    moved = [Step(name, begin - epoch, end - epoch) for name, begin, end in steps]
    return Arrived(tuple(moved), moved[0].begin, moved[-1].end, worker)


def _absolute(path: str) -> str:
    """``path``, also for the next world, before which the script may change its working directory."""
    with suppress(OSError):  # the working directory may be gone
        return os.path.abspath(path)
    return path


def _continued(path: str, begun: float, is_closed: Callable[[], bool]) -> Document:
    """The file goes on. A lost rank 0 may still hold it: the kernel needs some time to end a process."""
    for _ in attempts(HELD_SECONDS):
        with suppress(DocumentInUseError):
            return Document(path, resumes=True, begun=begun)
        if is_closed():
            break
    return Document(path, resumes=True, begun=begun)


def _sink(document: Document, rendezvous: TimelineAddress | None) -> RecordSink:
    return _Local(document) if rendezvous is None else Gathering(document, rendezvous)


class _Local:
    """A document with the records of this rank alone."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.shift = -document.origin
        self.ended = False
        self.is_ready = True

    def write(self, records: list[Record]) -> None:
        self._document.write(records)

    def close(self) -> None:
        self._document.close()

    def disown(self) -> None:
        self._document.disown()
