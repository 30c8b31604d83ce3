"""The observers of the engines of this process: metrics, timeline, autotuning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from collectives.api import World
from collectives.autotune.autotuner import Autotuner
from collectives.engine.engine import Engine
from collectives.metrics.exposition import Exposition
from collectives.metrics.meter import process_meter
from collectives.settings import Settings
from collectives.timeline.recorder import Recorder
from hvd_cluster.arrival import Arrival
from hvd_cluster.worlds import Worlds

__all__ = ["Observers"]


class Observers:
    """They follow the process from one engine to the next. For one thread at a time."""

    def __init__(self) -> None:
        self.arrival = Arrival()
        self.recorder = Recorder()
        self.autotuner = Autotuner()
        self._exposition: Exposition | None = None

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
            self.recorder.follow(engine, replace(world, round=round), settings, reason, steps)
            self.autotuner.follow(engine, settings)
            self._expose(settings.metrics_address, settings.metrics_port)

    def _expose(self, address: str, port: int) -> None:
        """Serve the metrics there, and nowhere else; nowhere if ``port`` is 0."""
        shown = self._exposition
        if shown is not None and (shown.address, shown.port) != (address, port):
            shown.close()
            self._exposition = None
        if port and self._exposition is None:
            self._exposition = Exposition(process_meter, address, port)

    def leave(self, goes_on: bool) -> None:
        """The engine has ended; the job ``goes_on`` with the next world."""
        self.recorder.leave(goes_on)
        self.autotuner.leave()
        process_meter.leave()
        if not goes_on:
            self._expose("", 0)

    def disown(self) -> None:
        """In a forked child: they are the parent's. Takes no lock."""
        self.recorder.disown()
        self.autotuner.disown()
        exposition, self._exposition = self._exposition, None
        if exposition is not None:
            exposition.disown()
        process_meter.disown()
