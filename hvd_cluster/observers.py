"""The observers of the engines of this process: metrics, timeline, autotuning, live page."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from collectives.api import World
from collectives.autotune.autotuner import Autotuner
from collectives.engine.engine import Engine
from collectives.metrics.exposition import Exposition
from collectives.metrics.meter import process_meter
from collectives.settings import Settings
from collectives.timeline.recorder import Recorder
from executors.job import is_job_id
from executors.member import Identity
from hvd_cluster.arrival import Arrival
from hvd_cluster.live import LivePage
from hvd_cluster.worlds import Worlds

__all__ = ["Observers"]

logger = logging.getLogger(__name__)

NO_PAGE = (
    "no live page: HVD_DASHBOARD is %r, but only a launcher that serves a page sets it; start the ranks by "
    "`hvdrun --dashboard` or another such launcher for a page. Training goes on without it"
)


class Observers:
    """They follow the process from one engine to the next. For one thread at a time.

    ``record`` begins a timeline in a file, or ends that one, for the live page; see :class:`hvd_cluster.live.LivePage`.
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
            identity = Identity.of(environment)
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
