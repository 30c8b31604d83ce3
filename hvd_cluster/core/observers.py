"""The observers of the engines of this process: metrics, timeline, autotuning, live page."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

from collectives import (
    Autotuner,
    Engine,
    Exposition,
    Recorder,
    RecordTimeline,
    RendezvousClient,
    Settings,
    SnapshotSender,
    Step,
    World,
    process_meter,
)
from executors import Course, WorkerIdentity, is_job_id
from hvd_cluster.core.worlds import Worlds

logger = logging.getLogger(__name__)


class Arrival:
    """Begins with the first ``init()`` of the process. For one thread at a time."""

    def __init__(self) -> None:
        self._begun: float | None = None
        self._is_told = False

    def begin(self) -> None:
        """``init()`` was called."""
        self._begun = self._begun or time.monotonic()

    def steps(self, environment: Mapping[str, str]) -> list[Step]:
        """The steps until now, in seconds since the epoch; none at the second call."""
        if self._begun is None or self._is_told:
            return []
        self._is_told = True
        course = Course.of(environment)
        now = time.time()
        begun = now - (time.monotonic() - self._begun)  # the clock may have been set since
        known = {"PLACEMENT": course.requested, "START": course.placed, "RENDEZVOUS": begun, "": now}
        times = [(name, begin) for name, begin in known.items() if begin is not None]
        return [Step(name, begin, end) for (name, begin), (_, end) in pairwise(times) if begin < end]


DEFAULT_STALL_SECONDS = 60.0
# A stall that is not reported again in this time is over.
OVERDUE = 1.5
LONGEST_HOST = 40
ID_END = 8


class LivePage:
    """Sends the numbers of this process to the driver until :meth:`close`."""

    def __init__(self, client: RendezvousClient, sender: SnapshotSender) -> None:
        self._client = client
        self._sender = sender

    @classmethod
    def of(cls, environment: Mapping[str, str], world: World, settings: Settings, record: RecordTimeline) -> LivePage:
        """That of a worker with ``environment``, which is in ``world`` first."""
        _, _, elsewhere = settings.dashboard.partition("@")
        address, _, port = elsewhere.rpartition(":")
        way = (address, int(port)) if elsewhere else world.rendezvous or ("", 0)
        client = RendezvousClient(*way, settings.secret, settings.timeouts.connect)
        identity = WorkerIdentity.of(environment)
        worker = f"worker-{world.topology.rank}" if identity is None else identity.worker
        patience = OVERDUE * (settings.stall_warning or DEFAULT_STALL_SECONDS)
        return cls(client, SnapshotSender(client, worker, _shown(world.host), process_meter, record, patience))

    def follow(self, engine: Engine) -> None:
        """``engine`` runs now."""
        self._sender.follow(engine)

    def close(self) -> None:
        """Send no more; waits for two seconds at most."""
        self._client.close()
        self._sender.close()


def _shown(host: str) -> str:
    """``host`` for a reader; the id of a node of Ray only tells nodes of one name apart."""
    return host if len(host) <= LONGEST_HOST else f"{socket.gethostname()} ({host[-ID_END:]})"


def record(recorder: Recorder, path: str, begins: bool) -> str:
    """Begin a timeline in the file ``path`` of rank 0, or end that one; the text for the page.

    The script may change its working directory in between: the file keeps its place, and its name tells it from others.
    A timeline of the script goes on, because a process has only one at a time.
    """
    if not begins:
        recorded = recorder.path
        if os.path.basename(recorded) != os.path.basename(path):
            return "not recorded to the end"
        recorder.stop()
        return f"recorded {recorded}"
    if recorder.is_recording:
        return "not recorded: the script records a timeline already"
    recorder.start(path, False)
    return f"records {recorder.path}" if recorder.is_recording else "not recorded: see the log of rank 0"


NO_PAGE = (
    "no live page: HVD_DASHBOARD is %r, but only a launcher that serves a page sets it; start the ranks by "
    "`hvdrun --dashboard` or another such launcher for a page. Training goes on without it"
)


class Observers:
    """They follow the process from one engine to the next. For one thread at a time.

    ``record`` begins a timeline in a file, or ends that one, for the live page; see :class:`LivePage`.
    """

    def __init__(self, record: Callable[[str, bool], str | None]) -> None:
        self._record = record
        self.arrival = Arrival()
        self.recorder = Recorder()
        self.autotuner = Autotuner()
        self._exposition: Exposition | None = None
        self._live: LivePage | None = None
        self._has_explained = False

    def follow(
        self, engine: Engine, world: World, worlds: Worlds | None, settings: Settings, environment: Mapping[str, str]
    ) -> None:
        """``engine`` runs in ``world``, or in a later one of ``worlds`` of an elastic job.

        The engine of a newcomer, which is alone, is only counted.
        """
        round, reason = (world.round, "") if worlds is None else (worlds.round, worlds.reason)
        is_alone = worlds is not None and worlds.is_alone
        process_meter.follow(engine, round, is_alone)
        if not is_alone:
            steps = self.arrival.steps(environment)
            identity = WorkerIdentity.of(environment)
            worker = "" if identity is None else identity.worker
            self.recorder.follow(engine, replace(world, round=round), settings, reason, steps, worker)
            self.autotuner.follow(engine, settings)
            self._expose(settings.metrics_address, settings.metrics_port)
        self._show(engine, environment, world, settings)

    def _expose(self, address: str, port: int) -> None:
        """Serve the metrics there, and nowhere else; nowhere if ``port`` is 0."""
        shown = self._exposition
        if shown is not None and (shown.address, shown.port) != (address, port):
            shown.close()
            self._exposition = None
        if port and self._exposition is None:
            self._exposition = Exposition(process_meter, address, port)

    def _show(self, engine: Engine, environment: Mapping[str, str], world: World, settings: Settings) -> None:
        """Send the numbers of this process to the live page of its job, if it has one."""
        if self._live is None and world.rendezvous is not None and settings.dashboard.partition("@")[0] == world.job:
            self._live = LivePage.of(environment, world, settings, self._record)
        if self._live is not None:
            self._live.follow(engine)
        elif world.topology.rank == 0:
            self._explain(settings.dashboard)

    def _explain(self, asked: str) -> None:
        """Say that there is no page, once, unless the variable is that of another job, which the ranks inherited."""
        if asked and not (self._has_explained or is_job_id(asked.partition("@")[0])):
            self._has_explained = True
            logger.warning(NO_PAGE, asked)

    def _hide(self) -> None:
        shown, self._live = self._live, None
        if shown is not None:
            shown.close()

    def leave(self, goes_on: bool) -> None:
        """The engine has ended; the job ``goes_on`` with the next world."""
        self.recorder.leave(goes_on)
        self.autotuner.leave()
        process_meter.leave()
        if not goes_on:
            self._expose("", 0)
            self._hide()

    def disown(self) -> None:
        """In a forked child: they are the parent's. Takes no lock."""
        self.recorder.disown()
        self.autotuner.disown()
        exposition, self._exposition = self._exposition, None
        if exposition is not None:
            exposition.disown()
        self._live = None
        process_meter.disown()
