"""The driver's side of a job in which Ray Train replaces lost workers: it publishes worlds, and starts nobody."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from executors.agents.ray.train.succession import Delivered, Succession, Turn
from executors.driver.member import WorkerIdentity
from executors.job.job import Job
from executors.job.worlds import (
    CALL,
    REPORTS,
    LastReport,
    Published,
    Report,
    WorldCall,
    answer_key,
    summary,
    world_key,
)

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
OVER = "the job is done"
# Ray Train takes a report within so long after it has fetched it from the worker.
SETTLE_SECONDS = 1.0


class Replacement:
    """The worlds of the workers of ``job``, the first of which are on ``hosts``, in the order of their places.

    A context manager, whose methods may be called by any thread. Owns the daemon thread "hvd-replacement", which takes
    the reports of workers, and ends with the block.
    """

    def __init__(self, job: Job, hosts: Sequence[str]) -> None:
        self._job = job
        self._succession = Succession(hosts)
        self._formed = self._succession.world
        self._ends: dict[str, int] = {}
        self._is_early = False
        self._lock = threading.Lock()  # Held for a few instructions, and while worlds and answers are stored.
        self._keys: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Owner: this object; bound: none, it waits for reports; abort: the end of the block.
        self._thread = threading.Thread(target=self._run, name="hvd-replacement", daemon=True)
        self._unsubscribe: Callable[[], None] = lambda: None

    def __enter__(self) -> Replacement:
        self._publish(self._succession.world)
        self._unsubscribe = self._job.subscribe(self._note)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._unsubscribe()
        self._keys.put(None)
        self._thread.join(LEAVE_SECONDS)
        with self._lock:
            self._publish(Published(self._succession.world.round + 1, text=OVER, is_over=True))

    def environments(self) -> list[dict[str, str]]:
        """The variables of the first workers, by their places."""
        with self._lock:
            return [self._environment(worker, is_newcomer=False) for worker in self._succession.workers]

    def lose(self, place: int, text: str) -> None:
        """The worker in ``place`` is gone: ``text`` says how."""
        with self._lock:
            self._succession.lose(place, text)

    def succeed(self, place: int, host: str) -> dict[str, str]:
        """The variables of the successor in ``place``, on ``host``."""
        with self._lock:
            return self._environment(self._succession.succeed(place, host), is_newcomer=True)

    def delivered(self, delivered: Delivered) -> None:
        """Ray Train has taken a report of all workers."""
        with self._lock:
            self._act(self._succession.delivered(delivered))

    def _environment(self, worker: str, is_newcomer: bool) -> dict[str, str]:
        slot = self._succession.slot(worker)
        identity = WorkerIdentity(worker, self._succession.world.round, is_newcomer)
        return self._job.place(slot, is_newcomer) | identity.variables()

    def _publish(self, world: Published) -> None:
        self._job.store.set(world_key(world.round), world.encode())

    def _act(self, turn: Turn) -> None:
        """Under the lock, so that worlds come in their order."""
        self._is_early = turn.is_early
        if turn.world is not None:
            self._publish(turn.world)
        for worker, answer in turn.answers.items():
            self._job.store.set(answer_key(worker, self._ends[worker]), answer.encode())

    # Reports of workers.

    def _note(self, key: str) -> None:
        """In the thread of the rendezvous server."""
        if key.startswith(REPORTS):
            self._keys.put(key)

    def _run(self) -> None:
        while (key := self._next_key()) is not None:
            sent = self._job.take(key) if key else None
            if sent is not None:
                self._heed(key.removeprefix(REPORTS).partition("/")[0], Report.decode(sent))

    def _next_key(self) -> str | None:
        """The key of the next report; None at the end of the block, "" where a last report was waited for."""
        try:
            # Bound: SETTLE_SECONDS, or none; abort: the end of the block.
            return self._keys.get(timeout=SETTLE_SECONDS if self._is_early else None)
        except queue.Empty:
            with self._lock:
                self._act(self._succession.conclude())
            return ""

    def _heed(self, worker: str, report: Report) -> None:
        if report.kind == "formed":
            self._tell_formed(report)
        elif report.kind in ("ready", "failed", "finished"):
            with self._lock:
                self._act(self._turn(worker, report))

    def _turn(self, worker: str, report: Report) -> Turn:
        if report.kind == "ready":
            return self._succession.ready(worker)
        if report.kind == "failed":
            return self._succession.cut_off(worker, report.round)
        self._ends[worker] = report.call
        return self._succession.finished(worker, report.round, LastReport.decode(report.text))

    def _tell_formed(self, report: Report) -> None:
        self._job.store.set(CALL, WorldCall(report.call).encode())
        with self._lock:
            self._succession.formed(report.round)
            world, before = self._succession.world, self._formed
            if report.round != world.round or before is world:
                return
            self._formed = world
        logger.warning(summary(world, report.pause, report.lost))
