"""The timeline of a process, from one engine to the next."""

from __future__ import annotations

import logging
import time
from functools import partial

from collectives.engine.engine import Engine
from collectives.settings import Settings
from collectives.timeline.document import Document, DocumentError
from collectives.timeline.records import MICROSECONDS, Record
from collectives.timeline.timeline import Timeline

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)


class Recorder:
    """At most one timeline at a time. For one thread at a time."""

    def __init__(self) -> None:
        self._timeline: Timeline | None = None
        self._path = ""

    def follow(self, engine: Engine, settings: Settings) -> None:
        """``engine`` runs: record it, if ``settings`` say so."""
        if settings.timeline:
            self.start(engine, settings.timeline, settings.timeline_mark_cycles)

    def start(self, engine: Engine, path: str, mark_cycles: bool) -> None:
        """Record ``engine`` into the file ``path``, instead of what is recorded now.

        Goes on if that is recorded already. A file that cannot be written is logged.
        """
        if self.is_recording and path == self._path:
            return
        self.stop()
        if engine.topology.rank != 0:
            return
        try:
            document = Document(path, int(time.time() * MICROSECONDS))
        except DocumentError as error:
            logger.warning("%s; training goes on without a timeline", error)
            return
        self._path = path
        self._timeline = Timeline(0, partial(_Local, document), mark_cycles)
        self._timeline.attach(engine.events)

    @property
    def is_recording(self) -> bool:
        """Whether events are recorded."""
        return self._timeline is not None and self._timeline.is_recording

    def stop(self) -> None:
        """Complete the file. Does nothing if nothing is recorded."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.close()

    def disown(self) -> None:
        """In a forked child: the timeline is the parent's. Takes no lock."""
        timeline, self._timeline = self._timeline, None
        if timeline is not None:
            timeline.disown()


class _Local:
    """A document with the records of this rank alone, which counts from now on."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self.shift = -time.monotonic()

    def write(self, records: list[Record]) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.write(records)

    def close(self) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.close()

    def disown(self) -> None:
        """See :class:`.timeline.Sink`."""
        self._document.disown()
