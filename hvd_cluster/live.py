"""This process on the live page of its job."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from collectives.api import World
from collectives.engine.engine import Engine
from collectives.live.sender import Recorder as Record
from collectives.live.sender import SnapshotSender
from collectives.metrics.meter import process_meter
from collectives.rendezvous.client import RendezvousClient
from collectives.settings import Settings
from collectives.timeline.recorder import Recorder
from executors.member import Identity

__all__ = ["LivePage", "record"]

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
    def of(cls, environment: Mapping[str, str], world: World, settings: Settings, record: Record) -> LivePage:
        """That of a worker with ``environment``, which is in ``world`` first."""
        _, _, elsewhere = settings.dashboard.partition("@")
        address, _, port = elsewhere.rpartition(":")
        way = (address, int(port)) if elsewhere else world.rendezvous or ("", 0)
        client = RendezvousClient(*way, settings.secret, settings.timeouts.connect)
        identity = Identity.of(environment)
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
