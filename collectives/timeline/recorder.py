"""The timeline of a process, from one engine to the next."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from collectives.api import World
from collectives.engine.bootstrap import own_address
from collectives.engine.engine import Engine
from collectives.settings import Settings
from collectives.timeline.document import Document, DocumentError
from collectives.timeline.gathering import Gathering
from collectives.timeline.meeting import Meeting
from collectives.timeline.records import MICROSECONDS, Record
from collectives.timeline.sending import Sender
from collectives.timeline.timeline import Sink, Timeline

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)


class Recorder:
    """At most one timeline at a time. For one thread at a time."""

    def __init__(self) -> None:
        self._engine: Engine | None = None
        self._meeting: Meeting | None = None
        self._timeline: Timeline | None = None
        self._path = ""

    def follow(self, engine: Engine, world: World, settings: Settings) -> None:
        """``engine`` runs in ``world``: record it, if ``settings`` say so."""
        self._engine = engine
        world = replace(world, topology=engine.topology)
        self._meeting = Meeting(world, settings, own_address(world, settings)) if engine.topology.size > 1 else None
        if settings.timeline:
            self.start(settings.timeline, settings.timeline_mark_cycles)

    def start(self, path: str, mark_cycles: bool) -> None:
        """Record the engine into the file ``path`` of rank 0, instead of what is recorded now.

        Goes on if that is recorded already. A file that cannot be written is logged.
        """
        if self._engine is None or (self.is_recording and path == self._path):
            return
        self.stop()
        rank = self._engine.topology.rank
        try:
            opener = self._opener(rank, path)
        except DocumentError as error:
            logger.warning("%s; training goes on without a timeline", error)
            return
        self._path = path
        self._timeline = Timeline(rank, opener, mark_cycles and rank == 0)
        self._timeline.attach(self._engine.events)

    def _opener(self, rank: int, path: str) -> Callable[[Callable[[], bool]], Sink]:
        meeting = self._meeting
        if rank > 0 and meeting is not None:
            return partial(Sender, meeting)
        document = Document(path, int(time.time() * MICROSECONDS))
        return lambda _: _Local(document) if meeting is None else Gathering(document, meeting)

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded."""
        return self._timeline is not None and self._timeline.is_recording

    def leave(self) -> None:
        """The engine has ended, and with it its timeline."""
        self.stop()
        self._engine = self._meeting = None

    def stop(self) -> None:
        """Complete the file. Does nothing if nothing is recorded."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()

    def disown(self) -> None:
        """In a forked child: the timeline is the parent's. Takes no lock."""
        timeline, self._timeline = self._timeline, None
        self._engine = self._meeting = None
        if timeline is not None:
            timeline.disown()


class _Local:
    """A document with the records of this rank alone, which counts from now on."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.shift = -time.monotonic()
        self.ended = False
        self.is_ready = True

    def write(self, records: list[Record]) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.write(records)

    def close(self) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.close()

    def disown(self) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.disown()
