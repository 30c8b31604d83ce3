"""The dashboard of a job: it collects what the live page shows, and passes on what the page asks for."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Protocol

from collectives import LAST_RECORDING, SNAPSHOT_PREFIX, Observer, Recording, Snapshot, Store, recording_key
from executors.api import ExecutorError, worker_id
from executors.dashboard.picture import Address, Picture
from executors.dashboard.server import DashboardServer
from executors.job.output import Lines, Sink, Sinks, TeeSink, say
from executors.job.worlds import CHANGES, WORLDS, Published

logger = logging.getLogger(__name__)

RECORD_SECONDS = 10.0
PAUSE_SECONDS = 3.0
"""The ranks begin and end a recording within this time."""
OTHER_ADDRESS = "give another address, or port 0 for any free one"
MORE_FILES = "raise the limit of open files (ulimit -n)"
ENDED = "the job is over"


class Shown(Protocol):
    """A job, as the dashboard needs it."""

    @property
    def id(self) -> str:
        """Its name."""

    @property
    def size(self) -> int:
        """How many ranks it starts with."""

    @property
    def store(self) -> Store:
        """Its store, in this process."""

    def subscribe(self, observer: Observer) -> Callable[[], None]:
        """Call ``observer`` with each key that changes, until the result is called."""


class Dashboard:
    """The live page of ``job`` at ``address``, None for no page: a context manager.

    A page that cannot be served is one line in the log, and then the ranks send nothing. ``name`` is what its own line
    on standard error begins with.
    """

    def __init__(self, job: Shown, address: Address | None, name: str = "hvdrun") -> None:
        self._job = job
        self._address = address
        self._name = name
        # Owned by the dashboard; held for a millisecond at most, while the picture changes or is drawn.
        self._lock = threading.Lock()
        self._changed: dict[str, float] = {}  # keys of the store that were not read yet, and when they changed
        self._picture = Picture(job.id, job.size)
        self._requests = 0
        self._recorded = 0.0  # until when the last request keeps the ranks busy
        self._server: DashboardServer | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def __enter__(self) -> Dashboard:
        if self._address is not None:
            self._open(self._address)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()
        if self._server is not None:
            with self._lock:
                self._picture.end(ENDED if error is None else str(error) or type(error).__name__)
            self._server.stop()

    def _open(self, address: Address) -> None:
        server = DashboardServer(address, self._draw, self._record)
        try:
            server.start()
        except (OSError, ExecutorError) as error:
            logger.warning("no live page at %s: %s. Training goes on without it", address, _reason(error))
            return
        self._server = server
        self._unsubscribe = self._job.subscribe(self._note)
        say(f"live page: {server.link}", self._name)

    @property
    def link(self) -> str:
        """The address of the page; empty if there is none."""
        return "" if self._server is None else self._server.link

    def variables(self, store: tuple[str, int] | None = None) -> dict[str, str]:
        """What the ranks need in their environment; ``store``: the way to the store, if not that of their job."""
        if self._server is None:
            return {}
        return {"HVD_DASHBOARD": self._job.id if store is None else f"{self._job.id}@{store[0]}:{store[1]}"}

    def watched(self, output: Sinks) -> Sinks:
        """``output``, whose last lines the page shows."""
        return output if self._server is None else _Watched(output, self._write)

    def _note(self, key: str) -> None:
        """Under the lock of the store, which must not be used here."""
        if key.startswith((SNAPSHOT_PREFIX, CHANGES, WORLDS)):
            self._changed[key] = time.monotonic()

    def _write(self, number: int, stream: str, line: str) -> None:
        with self._lock:
            self._picture.write(worker_id(number), stream, line)

    # On the thread of the server.

    def _draw(self) -> Mapping[str, Any]:
        news = [(key, self._changed.pop(key)) for key in list(self._changed)]
        found = [(key, self._job.store.get(key, 0.0), at) for key, at in news]
        with self._lock:
            for key, value, at in found:
                self._take(key, value, at)
            return self._picture.as_dict(time.monotonic())

    def _take(self, key: str, value: bytes, at: float) -> None:
        try:
            if key.startswith(SNAPSHOT_PREFIX):
                self._picture.hear(key.removeprefix(SNAPSHOT_PREFIX), Snapshot.decode(value), at)
            elif key.startswith(CHANGES):
                self._picture.tell(int(key.removeprefix(CHANGES)), value.decode())
            else:
                self._picture.publish(Published.decode(value), at)
        except (ValueError, TypeError) as error:
            logger.debug("the value that a rank has sent as %r cannot be shown: %s", key, error)

    def _record(self) -> str:
        if time.monotonic() < self._recorded:
            return "a recording goes on; press again when it is over"
        self._requests += 1
        self._recorded = time.monotonic() + RECORD_SECONDS + PAUSE_SECONDS
        request = Recording(self._requests, f"hvd-timeline-{self._job.id}-{self._requests}.json", RECORD_SECONDS)
        self._job.store.set(recording_key(request.number), request.encode())
        self._job.store.set(LAST_RECORDING, b"%d" % request.number)
        return f"asked all ranks to record {request.seconds:g} s into {request.path} of rank 0"


def _reason(error: Exception) -> str:
    """Without the place, which asyncio adds; the number of a resolver's error is none of the system's."""
    if not isinstance(error, OSError):
        return str(error)
    number = error.errno or 0
    reason = os.strerror(number) if number > 0 else error.strerror or str(error)
    return f"{reason}; {MORE_FILES if number in (errno.EMFILE, errno.ENFILE) else OTHER_ADDRESS}"


class _Watched:
    """Shows lines as they pass."""

    def __init__(self, output: Sinks, show: Callable[[int, str, str], None]) -> None:
        self._output = output
        self._show = show

    def sink(self, rank: int, name: str) -> Sink:
        return TeeSink(self._output.sink(rank, name), _Shower(lambda line: self._show(rank, name, line)))


class _Shower:
    """A sink that gives each line, without its end, to ``show``."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._lines = Lines()

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        for line in self._lines.feed(data):
            self._show(line.decode("utf-8", "replace").rstrip())

    def close(self) -> None:
        """The stream has ended."""
        for line in self._lines.flush():
            self._show(line.decode("utf-8", "replace").rstrip())
