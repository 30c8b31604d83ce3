"""Sends the snapshots of this process to the live page of its job."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from collectives.api import CollectiveTimeoutError, HorovodInternalError, Store
from collectives.engine.engine import Engine
from collectives.observe.live.snapshot import LAST_RECORDING, Recording, Snapshot, recording_key, snapshot_key
from collectives.observe.live.stalls import Stalls
from collectives.observe.metrics.meter import Meter

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
RANKS_AT_ONCE = 64
"""Where there are more ranks, each sends less often: the driver gets the same number of snapshots a second."""
SEND_SECONDS = 2.0
"""How long a snapshot may take; then it is dropped."""
CLOSE_SECONDS = 2.0
CHANGING = "not recorded: the ranks are changing; press again"

RecordTimeline = Callable[[str, bool], str | None]
"""Begins a timeline in the file of this path, or, if the second value is False, ends that one.

It returns what the page shows about it, or None if it cannot be done now, because the ranks are changing.
"""


class SnapshotSender:
    """Puts the numbers of ``meter`` into ``store`` under the name of ``worker`` until :meth:`close`.

    ``record`` does what the page asks for. ``patience``: a stall is shown for so many seconds after its last report.
    """

    def __init__(
        self, store: Store, worker: str, host: str, meter: Meter, record: RecordTimeline, patience: float = 60.0
    ) -> None:
        self._store = store
        self._worker = worker
        self._host = host
        self._meter = meter
        self._record = record
        self._patience = patience
        self._stalls: Stalls | None = None  # of the engine that runs
        self._requests: int | None = None  # the last one that was carried out, or came before this sender
        self._ends: tuple[str, float] | None = None  # the path that is recorded into, and until when
        self._recording = ""
        self._is_lost = False
        # Owned by the sender; set by close().
        self._closing = threading.Event()
        # Owned by the sender, joined by close(). The owner of the store's client closes that first: it ends all waits.
        self._thread = threading.Thread(target=self._run, name="hvd-snapshots", daemon=True)
        self._thread.start()

    def follow(self, engine: Engine) -> None:
        """``engine`` runs now, in place of the one before."""
        self._leave()
        self._stalls = Stalls(engine.events, self._patience)

    def _leave(self) -> None:
        stalls, self._stalls = self._stalls, None
        if stalls is not None:
            stalls.close()

    def close(self) -> None:
        """Send no more."""
        self._closing.set()
        self._leave()
        self._thread.join(CLOSE_SECONDS)

    # On its thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            self._turn()

    def _turn(self) -> None:
        started, seconds = time.monotonic(), PERIOD_SECONDS
        try:
            snapshot = self._snapshot()
            seconds = period(snapshot.size)
            if self._requests is None:
                self._requests = self._last_request()
            self._store.set(snapshot_key(self._worker), snapshot.encode(), SEND_SECONDS)
            self._await_request(seconds)
            self._is_lost = False
        except (HorovodInternalError, ValueError, TypeError) as error:
            self._note(error)
        self._closing.wait(max(0.0, started + seconds - time.monotonic()))

    def _note(self, error: Exception) -> None:
        """One line, until the driver can be reached again."""
        if not (self._is_lost or self._closing.is_set()):
            logger.info("the live page gets no news of this rank: %s", error)
        self._is_lost = True

    def _snapshot(self) -> Snapshot:
        now, stalls = time.monotonic(), self._stalls
        shown = [] if stalls is None else stalls.shown(now)
        return Snapshot.of(self._meter.read(), now, self._host, os.getpid(), shown, self._recording)

    def _last_request(self) -> int:
        """Requests before the start of this sender were for others, or for an earlier engine of this process."""
        try:
            return int(self._store.get(LAST_RECORDING, 0.0))
        except CollectiveTimeoutError:
            return 0

    def _await_request(self, seconds: float) -> None:
        if self._ends is not None:
            self._end_recording(*self._ends)
            return
        number = (self._requests or 0) + 1
        try:
            data = self._store.get(recording_key(number), seconds)
        except CollectiveTimeoutError:
            return
        self._requests = number
        request = Recording.decode(data)
        said = self._record(request.path, True)
        self._recording = CHANGING if said is None else said
        self._ends = None if said is None else (request.path, time.monotonic() + request.seconds)

    def _end_recording(self, path: str, due: float) -> None:
        said = self._record(path, False) if time.monotonic() >= due else None
        if said is not None:  # or it is tried again with the next snapshot
            self._ends, self._recording = None, said


def period(size: int) -> float:
    """The seconds between two snapshots of a rank, in a job of ``size`` ranks."""
    return PERIOD_SECONDS * max(1.0, size / RANKS_AT_ONCE)
