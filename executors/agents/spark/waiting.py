"""The driver's wait for the workers that Spark starts: a static job."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from collectives import override
from executors.agents.spark.connection import TaskIdentity
from executors.agents.spark.console import TaskListener
from executors.agents.spark.plan import SparkOptions
from executors.agents.spark.session import reason
from executors.agents.spark.stage import StageFinished
from executors.api import ExecutorError, StartTimeoutError, WorkerError, worker_id
from executors.driver.driver import Driver
from executors.driver.job import JobShell
from executors.driver.outcome import Outcome, values
from executors.failures import Failure, FailureKind, Patience
from executors.job.job import Job
from executors.job.loop import Loop
from executors.job.output import say
from executors.membership import Limits

logger = logging.getLogger(__name__)

# The driver knows no hosts: Spark places the tasks.
SPARK = "Spark"
# Spark reports the end of a job a moment after its tasks ended.
END_NEWS_SECONDS = 2.0
# After this time a waiting user is told how many workers have started.
NOTICE_SECONDS = 15.0
# After a failure, the tasks may take this long to end by themselves, besides the grace of their workers.
FAILURE_SECONDS = 5.0


class WorkerWait(JobShell, TaskListener):
    """The shell of ``job``, whose workers are the tasks of a stage.

    The tasks report by their connections to this process. Spark reports the end of the stage, with the outcomes of
    tasks that are unable to connect. Spark may tell late of a failure. The threads of the console and of the stage call
    the methods up to :meth:`finished`; all else happens in the loop.
    """

    _loop: Loop

    def __init__(self, job: Job, options: SparkOptions) -> None:
        super().__init__()
        self._size = job.size
        self._options = options
        self._loop = Loop()
        seconds = options.grace + FAILURE_SECONDS
        self.driver = Driver(Limits.static(job.size), job, self, math.inf, patience=Patience(seconds, seconds))
        self._busy: Callable[[], bool] = bool
        self._ranks_there: set[int] = set()
        self._lost: dict[int, TaskIdentity] = {}
        self._error: ExecutorError | None = None
        self._is_over = False

    @override
    def connected(self, identity: TaskIdentity) -> None:
        """A task came."""
        self.soon(partial(self._connected, identity))

    @override
    def lost(self, identity: TaskIdentity) -> None:
        """The connection to a task ended before the task."""
        self.soon(partial(self._note_loss, identity))

    @override
    def failed(self, outcome: bytes) -> None:
        """A rank failed, with this pickled outcome. Spark itself may report it much later."""
        self.soon(lambda: self._add(pickle.loads(outcome)))

    @override
    def delivered(self, outcome: bytes | bytearray) -> None:
        """A task sent this pickled outcome of its rank, at its end."""
        # At once, because missing() is called as soon as Spark has seen the end of the task.
        found: Outcome = pickle.loads(outcome)
        self.outcomes[worker_id(found.rank)] = found

    def missing(self) -> list[int]:
        """The ranks whose outcomes were not delivered."""
        return [rank for rank in range(self._size) if worker_id(rank) not in self.outcomes]

    def finished(self, end: StageFinished) -> None:
        """Spark ended the stage, with the pickled outcomes of the missing ranks or with an error."""
        self.soon(partial(self._finished, end))

    def values(self, busy: Callable[[], bool]) -> list[object]:
        """The values by rank, at the end of a stage; none if Spark has skipped the stage.

        ``busy`` tells whether tasks of it run. Raises the cause of a failure, StartTimeoutError, ExecutorError.
        """
        self._busy = busy
        self._is_over = False
        self.after(NOTICE_SECONDS, partial(self._log_progress, busy))
        self._await_start()
        self.driver.found({SPARK: self._size})
        self._loop.run(lambda: self._is_over)
        if self._error is not None:
            raise self._error
        self.driver.check()
        return _checked(list(self.outcomes.values()), self._size) if self.outcomes else []

    # Agents.

    @override
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        """Spark starts the tasks, which find their places."""

    @override
    def stop(self, worker: str) -> None:
        self.end()

    @override
    def kill(self, worker: str) -> None:
        self.end()

    @override
    def end(self, spare: str | None = None) -> None:
        """The owner of the stage cancels it, and so its tasks.

        Where all failures are consequences, such as rows that broke off, Spark knows the cause and is about to say it.
        """
        if self.driver.has_cause:
            self._leave()
        else:
            self.after(END_NEWS_SECONDS, self._leave)

    @override
    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Reports that wait come before ``action``."""
        self._loop.after(seconds, partial(self._loop.soon, action))

    # In the loop.

    def _leave(self) -> None:
        self._is_over = True

    def _connected(self, identity: TaskIdentity) -> None:
        self._ranks_there.add(identity.rank)
        self.driver.up(worker_id(identity.rank))
        if self._options.verbose:
            say(f"rank {identity.rank} of {self._size} is on {identity.host_name}", "hvd_cluster.spark")

    @property
    def _is_starting(self) -> bool:
        return len(self._ranks_there) < self._size and not self._lost and not self.driver.is_over

    def _log_progress(self, busy: Callable[[], bool]) -> None:
        if busy == self._busy and self._is_starting:
            count, size = len(self._ranks_there), self._size
            text = "%d of %d workers started so far; Spark computes their rows, or lacks free slots"
            logger.warning(text, count, size)

    def _await_start(self) -> None:
        self.after(self._options.start_timeout, partial(self._check_start, self._busy))

    def _check_start(self, busy: Callable[[], bool]) -> None:
        if busy != self._busy or not self._is_starting:
            return
        if busy():
            # Earlier stages run, or the tasks run but cannot reach this process.
            self._await_start()
        else:
            self._fail(self._start_timeout())

    def _add(self, outcome: Outcome) -> None:
        self.report(worker_id(outcome.rank), outcome)

    def _note_loss(self, identity: TaskIdentity) -> None:
        if worker_id(identity.rank) in self.outcomes:
            return
        self._lost[identity.rank] = identity
        if self.driver.has_cause:
            self._leave()
        elif len(self._lost) == 1:
            self.after(END_NEWS_SECONDS, self._count_losses)

    def _count_losses(self) -> None:
        for identity in self._lost.values():
            self.driver.failed(worker_id(identity.rank), Failure(FailureKind.EXIT, "was lost", error=_death(identity)))
        self._leave()

    def _finished(self, end: StageFinished) -> None:
        if end.error is not None and (self.missing() or self._all_are_consequences()):
            self._stage_failed(end.error)
        else:
            for data in end.value or ():
                self.delivered(data)
            self._take()
        self._leave()

    def _all_are_consequences(self) -> bool:
        """Whether ranks failed, and each one only because of something else: of Spark, as the stage failed too."""
        failed = [outcome for outcome in self.outcomes.values() if outcome.failed]
        return bool(failed) and all(outcome.consequence for outcome in failed)

    def _stage_failed(self, error: BaseException) -> None:
        logger.debug("Spark could not run the workers", exc_info=error)
        if self._lost:
            self._count_losses()
        elif isinstance(error, ExecutorError):
            self._fail(error)
        elif not self.driver.has_cause:
            self._fail(ExecutorError(f"Spark could not run the workers: {reason(str(error))}"))

    def _take(self) -> None:
        for outcome in self.outcomes.values():
            self._add(outcome)
        if self.driver.has_cause:
            return
        if self._lost.keys() & set(self.missing()):
            self._count_losses()
        elif self._ranks_there and not self.outcomes:
            text = (
                "all workers ended because their tasks lost the connection to this process: it was stopped for too "
                "long, or the network failed"
            )
            self._fail(ExecutorError(text))

    def _fail(self, error: ExecutorError) -> None:
        self._error = error
        self._leave()

    def _start_timeout(self) -> StartTimeoutError:
        return StartTimeoutError(
            f"{len(self._ranks_there)} of {self._size} workers started within {self._options.start_timeout:g} s. Other "
            f"jobs may use the executors, these may have fewer than {self._size} slots, or Python may be slow to "
            "start: raise start_timeout (or HOROVOD_SPARK_START_TIMEOUT), end the other jobs, or set a smaller num_proc"
        )


def _death(identity: TaskIdentity) -> WorkerError:
    return WorkerError(
        f"the task of rank {identity.rank} on {identity.host_name} was lost: its executor was killed or ran out of "
        "memory, the job was cancelled, or this process or the network stopped responding; look at the log of the "
        "executor",
        identity.rank,
        identity.host,
    )


def _checked(outcomes: Sequence[Outcome], size: int) -> list[object]:
    results = values(outcomes)
    silent = sorted(set(range(size)) - {outcome.rank for outcome in outcomes})
    if silent:
        raise ExecutorError(f"Spark returned no result of ranks {silent}, although no rank failed; report this")
    return results
