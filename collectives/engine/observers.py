"""Tells the observers of an engine of the events of its batches. Only called while there are observers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from collectives.api import Parameters, Request
from collectives.backends.base import Backend
from collectives.backends.phases import PROFILER, Span
from collectives.controller.worker import Batch
from collectives.engine.work import Work
from collectives.events import Decided, EventStream, Failed, Finished, Phase, Started, Switched


class Reporter:
    """Publishes on ``events``. For the thread that drives the engine."""

    def __init__(self, events: EventStream) -> None:
        self._events = events
        self._spans: dict[int, list[Span]] = {}  # of the phases of each batch that has begun

    def decided(self, batches: Sequence[Batch]) -> None:
        """The coordinator decided ``batches``."""
        now = time.monotonic()
        for batch in batches:
            self._publish_decision(batch.id, [response.request for response in batch.responses], now)

    def _publish_decision(self, batch: int, requests: Sequence[Request], now: float) -> None:
        if Decided not in self._events.wanted:
            return
        self._events.publish(Decided(batch, _names(requests), requests[0].process_set, now))

    def switched(self, batch: int, parameters: Parameters) -> None:
        """``batch`` is the first that runs under ``parameters``."""
        self._events.publish(Switched(batch, parameters, time.monotonic()))

    def started(self, batch: int, works: Sequence[Work], backend: Backend, version: int) -> None:
        """``works`` begin on ``backend`` as the batch of this number."""
        self.time_phases(batch, backend)
        self.publish_start(batch, works, backend, version)

    def time_phases(self, batch: int, backend: Backend) -> None:
        """Keep the phases of the batch that begins on ``backend``; it may be an attempt that does not run."""
        in_profile = PROFILER.is_recording()
        if in_profile or Phase in self._events.wanted:
            spans = self._spans[batch] = []
            backend.observe(spans.append, in_profile)  # on any thread
        elif backend.on_phase is not None:
            self.rest(backend)

    def rest(self, backend: Backend) -> None:
        """There are no observers any more."""
        backend.observe(None)
        self._spans.clear()

    def publish_start(self, batch: int, works: Sequence[Work], backend: Backend, version: int) -> None:
        """As :meth:`started`, without the phases."""
        now = time.monotonic()
        for work in works:
            work.batch = batch
        if Started not in self._events.wanted:
            return
        requests = [work.request for work in works]
        first, nbytes = requests[0], sum([request.nbytes for request in requests])
        self._events.publish(
            Started(
                batch, _names(requests), first.process_set, first.operation.value, nbytes, backend.name, version, now
            )
        )

    def _publish_phases(self, batch: int | None) -> None:
        if batch is not None:
            for phase in _phases(batch, self._spans.pop(batch, ())):
                self._events.publish(phase)

    def agreed(self, first: int, batches: Sequence[Sequence[Work]]) -> None:
        """All ranks bypass the coordinator and run ``batches``. ``first`` is the number of the first."""
        now = time.monotonic()
        for batch, works in enumerate(batches, first):
            self._publish_decision(batch, [work.request for work in works], now)

    def finished(self, batch: int, works: Sequence[Work]) -> None:
        """The results of ``works`` are there."""
        self._publish_phases(batch)
        if Finished not in self._events.wanted:
            return
        requests = [work.request for work in works]
        self._events.publish(Finished(batch, _names(requests), requests[0].process_set, time.monotonic()))

    def failed(self, work: Work, error: Exception) -> None:
        """``work`` ended with ``error``."""
        request = work.request
        self._publish_phases(work.batch)
        self._events.publish(Failed(work.batch, request.name, request.process_set, error, time.monotonic()))


class AttemptReporter:
    """Reports an attempt of batches on ``backend``, the first of which has the number ``first`` if they run.

    A rank copies the data in before it knows whether they run.
    """

    def __init__(self, reporter: Reporter, first: int, backend: Backend, version: int) -> None:
        self._reporter = reporter
        self._first = first
        self._backend = backend
        self._version = version
        self._agreed = False
        self._begun: list[tuple[int, Sequence[Work]]] = []

    def begin(self, batch: int, works: Sequence[Work]) -> None:
        """The batch of this number begins, if it runs."""
        self._reporter.time_phases(batch, self._backend)
        if self._agreed:
            self._reporter.publish_start(batch, works, self._backend, self._version)
        else:
            self._begun.append((batch, works))

    def agreed(self, batches: Sequence[Sequence[Work]]) -> None:
        """All ranks run ``batches``."""
        self._agreed = True
        self._reporter.agreed(self._first, batches)
        for batch, works in self._begun:
            self._reporter.publish_start(batch, works, self._backend, self._version)


def _names(requests: Sequence[Request]) -> tuple[str, ...]:
    return tuple([request.name for request in requests])


def _phases(batch: int, spans: Sequence[Span]) -> Iterator[Phase]:
    """Two events for each name at most: the first call, and all others."""
    calls: dict[str, list[Span]] = {}
    for span in spans:
        calls.setdefault(span[0], []).append(span)
    for name, of_name in calls.items():
        for some in filter(None, (of_name[:1], of_name[1:])):
            begin, end = min([span[1] for span in some]), max([span[2] for span in some])
            yield Phase(batch, name, begin, end, len(some), sum([end - begin for _, begin, end in some]))
