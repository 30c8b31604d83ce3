"""A worker's side of an elastic job: it reads its worlds from the rendezvous store, and reports to the driver."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from collectives import CollectiveTimeoutError, HorovodInternalError, PeerLostError, Store, attempts
from executors.job.worlds import (
    CALL,
    Answer,
    Published,
    Report,
    WorldCall,
    answer_key,
    metrics_key,
    report_key,
    world_key,
)

logger = logging.getLogger(__name__)

POLL_SECONDS = 50.0
AGAIN_SECONDS = 1.0
"""The first try waits so long for the driver, and each later one twice as long, up to MOST_AGAIN_SECONDS."""
MOST_AGAIN_SECONDS = 16.0
PATIENCE_SECONDS = 60.0
"""How long a worker repeats a report to a driver that does not answer."""
LOST_SECONDS = 300.0
"""A driver that does not answer for so long is lost. It may be stopped, or its host busy; its end ends its workers."""

Listener = Callable[[Published], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The id of a worker, the round of the last world when it was started, and whether that world is without it."""

    worker: str
    round: int
    is_newcomer: bool

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> WorkerIdentity | None:
        """The identity in the variables of a worker of an elastic job; None in any other process."""
        worker = environment.get("HOROVOD_WORKER_ID", "")
        if environment.get("HOROVOD_ELASTIC") != "1" or not worker:
            return None
        is_newcomer = environment.get("HOROVOD_NEWCOMER") == "1"
        return cls(worker, int(environment.get("HOROVOD_ROUND", "0")), is_newcomer)

    def variables(self) -> dict[str, str]:
        """The reverse of :meth:`of`."""
        return {
            "HOROVOD_ELASTIC": "1",
            "HOROVOD_WORKER_ID": self.worker,
            "HOROVOD_ROUND": str(self.round),
            "HOROVOD_NEWCOMER": str(int(self.is_newcomer)),
        }


class Member:
    """Waits for the worlds of the job from ``identity.round`` on, and calls ``listener`` with each.

    Owns the daemon thread "hvd-worlds", from :meth:`start` to :meth:`close`; it calls ``listener``. It waits for the
    driver; closing the store's client ends that wait.
    """

    def __init__(self, store: Store, identity: WorkerIdentity, listener: Listener) -> None:
        self.identity = identity
        self._store = store
        self._listener = listener
        self._numbers = itertools.count()
        self._worlds: list[Published] = []
        self._changed = threading.Condition()  # Held for a few instructions, and to wait for a world.
        self._stopped = threading.Event()
        self._lost: HorovodInternalError | None = None
        self._thread = threading.Thread(target=self._run, name="hvd-worlds", daemon=True)

    def start(self) -> None:
        """Begin to wait for worlds."""
        self._thread.start()

    def close(self) -> None:
        """Wait for no more worlds; the caller closes the client of the store."""
        with self._changed:
            self._stopped.set()
            self._changed.notify_all()

    @property
    def is_over(self) -> bool:
        """Whether the driver has ended the job."""
        return bool(self._worlds) and self._worlds[-1].is_over

    def newest(self) -> Published | None:
        """The world that was published last, as far as it is known here."""
        return self._worlds[-1] if self._worlds else None

    def world_of(self, round: int) -> Published | None:
        """The world of ``round``, if it is known here."""
        return next((world for world in self._worlds if world.round == round), None)

    def since(self, round: int) -> list[Published]:
        """The worlds after that of ``round``, as far as they are known here."""
        return [world for world in self._worlds if world.round > round]

    def forget_before(self, round: int) -> None:
        """Keep no world before that of ``round``: a long job has thousands, each with all of its workers."""
        with self._changed:
            self._worlds = [world for world in self._worlds if world.round >= round]

    def wait(self, is_wanted: Callable[[Published], bool], seconds: float) -> Published:
        """The newest world, as soon as it ``is_wanted`` or the job is over.

        Raises CollectiveTimeoutError after ``seconds``, HorovodInternalError after :meth:`close` or without a driver.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._cannot_come() or self._has(is_wanted), seconds):
                raise CollectiveTimeoutError(
                    f"{self.identity.worker}: the driver published no further world within {seconds:g} s; it may wait "
                    "for hosts or workers, see its log, or raise the elastic timeout"
                )
            if self._stopped.is_set():
                raise HorovodInternalError(f"{self.identity.worker} waits for no more worlds: it is about to end")
            if self._lost is not None:
                raise self._lost
            return self._worlds[-1]

    def _cannot_come(self) -> bool:
        return self._stopped.is_set() or self._lost is not None

    def report(self, report: Report, seconds: float = PATIENCE_SECONDS) -> None:
        """Send ``report`` to the driver, at least once, and for up to ``seconds``. Raises the errors of the store.

        The last try may end up to MOST_AGAIN_SECONDS later.
        """
        key, value = report_key(self.identity.worker, next(self._numbers)), report.encode()
        # A driver that hundreds of workers ask at once gets no time by tries that end before its answer.
        waits = (min(AGAIN_SECONDS * 2**number, MOST_AGAIN_SECONDS) for number in itertools.count())
        self._patiently(lambda: self._store.set(key, value, next(waits)), seconds)

    def call(self) -> WorldCall:
        """The call of an elastic function in which the ranks of the job are. Raises as above."""
        try:
            return WorldCall.decode(self._patiently(partial(self._store.get, CALL, 0.0), LOST_SECONDS))
        except CollectiveTimeoutError:
            return WorldCall()

    def call_after(self, call: WorldCall, seconds: float) -> WorldCall:
        """The call in which the ranks are, as soon as that is no longer ``call``, or the job is over.

        Raises CollectiveTimeoutError after ``seconds``, and as :meth:`wait` and :meth:`report`.
        """
        end = time.monotonic() + seconds
        while not self.is_over and time.monotonic() < end:
            present = self.call()
            if present != call:
                return present
            with suppress(CollectiveTimeoutError):
                self.wait(lambda world: False, AGAIN_SECONDS)
        if self.is_over:
            return call
        raise CollectiveTimeoutError(f"the ranks began no call of an elastic function within {seconds:g} s")

    def finish(self, report: Report) -> Answer:
        """Send ``report`` of an end, and wait for the answer, for as long as the driver lives. Raises as above."""
        self.report(report)
        get = partial(self._store.get, answer_key(self.identity.worker, report.call), POLL_SECONDS)
        while not self.is_over:
            with suppress(CollectiveTimeoutError):
                return Answer.decode(self._patiently(get, LOST_SECONDS))
        return Answer("end")

    def give_metrics(self, number: int, metrics: bytes) -> None:
        """Show the ``metrics`` of its last report to the others, which repeat theirs for the ``number``-th time."""
        self._patiently(partial(self._store.set, metrics_key(self.identity.worker, number), metrics), PATIENCE_SECONDS)

    def metrics_of(self, worker: str, number: int) -> bytes:
        """Those that ``worker`` gives for repetition ``number``. Raises as above, and CollectiveTimeoutError."""
        return self._store.get(metrics_key(worker, number), PATIENCE_SECONDS)

    def _has(self, is_wanted: Callable[[Published], bool]) -> bool:
        return bool(self._worlds) and (self._worlds[-1].is_over or is_wanted(self._worlds[-1]))

    def _run(self) -> None:
        for round in itertools.count(self.identity.round):
            world = self._next(round)
            if world is None:
                return
            with self._changed:
                self._worlds.append(world)
                self._changed.notify_all()
            self._listener(world)
            if world.is_over:
                return

    def _next(self, round: int) -> Published | None:
        """The world of ``round``; None when this member is closed, or the driver is lost."""
        get = partial(self._store.get, world_key(round), POLL_SECONDS)
        while not self._stopped.is_set():
            try:
                return Published.decode(self._patiently(get, LOST_SECONDS))
            except CollectiveTimeoutError:
                continue
            except HorovodInternalError as error:
                if not self._stopped.is_set():
                    self._lose(error)
                return None
        return None

    def _patiently(self, call: Callable[[], T], seconds: float) -> T:
        """The value of ``call``, which is repeated while the driver does not answer."""
        for _ in attempts(seconds, self._stopped.wait):
            try:
                return call()
            except PeerLostError as error:
                lost = error
            if self._cannot_come():
                break
        raise lost

    def _lose(self, error: HorovodInternalError) -> None:
        text = f"{self.identity.worker}: the driver of the job is lost, so no further world will come: {error}"
        logger.warning(text)
        with self._changed:
            self._lost = HorovodInternalError(text)
            self._changed.notify_all()
