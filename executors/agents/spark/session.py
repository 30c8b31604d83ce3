"""The active session, classic or Spark Connect: settings, slots, tags, cancellation, errors.

Spark itself would look for the slots of a barrier stage again and again, for ten minutes, before it fails.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from executors.api import ExecutorError, PlacementError
from executors.job import host

logger = logging.getLogger(__name__)


# After these words Spark repeats the error, with its own stack trace.
REPETITION = re.compile(r"\n\s*(Driver stacktrace:|JVM stacktrace:)")
JAVA_FRAME = re.compile(r"\s+at [\w.$/@<>\-]+\(.*\)|\s+\.\.\. \d+ more|\s*")
CALL = re.compile(r"\AAn error occurred while calling [\w.]+\n: ")
IMPORT = re.compile(r"^(ModuleNotFoundError|ImportError): ", re.MULTILINE)
ADVICE = (
    "the Python of the executors lacks a module: install hvd-cluster[spark] there, or set PYSPARK_PYTHON to a Python "
    "that has it"
)


def reason(text: str) -> str:
    """The ``text`` of an error of Spark without the stack traces of Java, with advice for known causes."""
    head = CALL.sub("", REPETITION.split(text, maxsplit=1)[0])
    kept = "\n".join(line for line in head.splitlines() if not JAVA_FRAME.fullmatch(line))
    return f"{kept}\n{ADVICE}" if IMPORT.search(kept) else kept


Setting = Callable[[str], str | None]


def check_settings(setting: Setting) -> None:
    """Raise PlacementError if Spark does not run barrier stages at all."""
    if _is_local(setting("spark.master") or ""):
        return  # Spark ignores dynamic allocation there
    if (setting("spark.dynamicAllocation.enabled") or "false").lower() == "true":
        raise PlacementError(
            "Spark cannot start all workers at once with dynamic allocation of executors "
            "(spark.dynamicAllocation.enabled=true); set it to false and give the number of executors"
        )


def _is_local(master: str) -> bool:
    """Whether the driver is the only executor. "local-cluster[...]" has others."""
    return master == "local" or master.startswith("local[")


def promised(setting: Setting) -> int | None:
    """The number of slots when all requested executors have started; None if unknown."""
    per_task, per_executor = int(setting("spark.task.cpus") or 1), int(setting("spark.executor.cores") or 1)
    instances, most = setting("spark.executor.instances"), setting("spark.cores.max")
    if (setting("spark.master") or "").startswith("local"):
        return None
    if instances is not None:
        return int(instances) * (per_executor // per_task)
    return None if most is None else int(most) // per_task


def shortage(size: int, slots: int, setting: Setting) -> PlacementError:
    """The error for ``size`` workers if Spark runs only ``slots`` tasks at a time."""
    per_task = {
        name: value
        for name in ("spark.task.cpus", "spark.task.resource.gpu.amount", "spark.executor.instances")
        if (value := setting(name)) is not None
    }
    needs = f" ({', '.join(f'{name}={value}' for name, value in per_task.items())})" if per_task else ""
    return PlacementError(
        f"{size} workers need {size} task slots at the same time, but the executors of this Spark application have "
        f"{slots}{needs}; set num_proc to at most {slots}, or give the application more: spark.executor.instances, "
        "spark.executor.cores, spark.cores.max"
    )


# Executors register one after the other when an application starts.
SETTLE_SECONDS = 5.0
FIRST_EXECUTOR_SECONDS = 30.0
LOOK_SECONDS = 0.1
MOST_TASKS = 1 << 20


# The most slots that each application has had, by its id: Spark starts another executor for one that is lost.
_seen: dict[str, int] = {}


class Session:
    """One Spark session. A Connect client has no SparkContext, so some values are unknown there."""

    def __init__(self, spark: Any) -> None:
        self.spark = spark
        self.connect = type(spark).__module__.startswith("pyspark.sql.connect")
        self._tasks: dict[str, int] = {}

    @classmethod
    def active(cls) -> Session:
        """The session of this thread. Raises ExecutorError where there is none."""
        if is_remote() or SparkContext._active_spark_context is not None:
            try:
                return cls(SparkSession.active() if is_remote() else SparkSession.builder.getOrCreate())
            except RuntimeError:
                pass
        raise ExecutorError("there is no active Spark session; make one with SparkSession.builder.getOrCreate() first")

    def setting(self, name: str) -> str | None:
        """The value of a setting of Spark, None where it is not set."""
        value: str | None = self.spark.conf.get(name, None)
        return value

    def default_size(self) -> int | None:
        """Spark's default parallelism; None where only the server of Spark Connect knows it."""
        if self.connect:
            text = self.setting("spark.default.parallelism")
            return int(text) if text else None
        size: int = self.spark.sparkContext.defaultParallelism
        return size

    def check_slots(self, size: int, timeout: float) -> None:
        """Raise PlacementError where ``size`` tasks can never run at the same time.

        Waits for executors that are still starting: at most ``timeout`` seconds if the settings ask for enough of them
        or enough existed before, and a few seconds otherwise.
        """
        check_settings(self.setting)
        if self.connect:
            return
        application = self.spark.sparkContext.applicationId
        patient = max(promised(self.setting) or 0, _seen.get(application, 0)) >= size
        slots = self._settled(size, timeout, patient)
        _seen[application] = max(slots, _seen.get(application, 0))
        if slots < size:
            raise shortage(size, slots, self.setting)

    def _settled(self, size: int, timeout: float, patient: bool) -> int:
        """The number of slots, when there are ``size`` or no more are expected."""
        start = grown = time.monotonic()
        slots, reported = self._slots(), False
        # Bound: timeout; abort: an exception out of a signal handler.
        while slots < size and (now := time.monotonic()) < start + timeout:
            if now > grown + (SETTLE_SECONDS if slots else FIRST_EXECUTOR_SECONDS):
                if not patient:
                    break
                if not reported:
                    logger.warning("%d of %d slots so far; waiting for executors that Spark has to start", slots, size)
                reported = True
            time.sleep(LOOK_SECONDS)
            if (count := self._slots()) > slots:
                slots, grown = count, time.monotonic()
        return slots

    def addresses(self) -> tuple[str, list[str]]:
        """The address on which a server of this process listens, and those by which executors may reach it."""
        if self.connect:
            own = host.address_towards(self.spark.client.host)
            return own, [own]
        # Spark writes IPv6 addresses in brackets.
        name = (self.setting("spark.driver.host") or "127.0.0.1").strip("[]")
        return (self.setting("spark.driver.bindAddress") or name).strip("[]"), [name]

    def busy(self, tag: str) -> bool:
        """Whether tasks with ``tag`` run now, as far as this process knows."""
        if self.connect:
            return self._tasks.get(tag, 0) > 0
        tracker = self.spark.sparkContext.statusTracker()
        stages = [tracker.getStageInfo(stage) for stage in self._stages(tag)]
        return any(stage is not None and stage.numActiveTasks > 0 for stage in stages)

    def leaving_tasks(self, tag: str) -> set[int]:
        """The ids of the tasks with ``tag`` on executors that will be decommissioned.

        A client of Spark Connect knows of none.
        """
        if self.connect:
            return set()
        context = self.spark.sparkContext._jsc.sc()
        scheduler, store = context.taskScheduler(), context.statusStore()
        executors = store.executorList(True)
        ids = [executors.apply(index).id() for index in range(executors.size())]
        if not any(scheduler.getExecutorDecommissionState(id).isDefined() for id in ids):
            return set()
        tasks = (task for stage in self._stages(tag) for task in self._tasks_of(store, stage))
        return {
            int(task.taskId())
            for task in tasks
            if scheduler.getExecutorDecommissionState(task.executorId()).isDefined()
        }

    def _tasks_of(self, store: Any, stage: int) -> Iterator[Any]:
        """The tasks of all attempts of a stage: Spark repeats one whose input was lost, while its tasks still run."""
        info = self.spark.sparkContext.statusTracker().getStageInfo(stage)
        for attempt in range(0 if info is None else info.currentAttemptId + 1):
            tasks = store.taskList(stage, attempt, MOST_TASKS)
            yield from (tasks.apply(index) for index in range(tasks.size()))

    def _stages(self, tag: str) -> list[int]:
        """The numbers of the stages of the jobs with ``tag``."""
        tracker = self.spark.sparkContext.statusTracker()
        ids = self.spark.sparkContext._jsc.sc().statusTracker().getJobIdsForTag(tag)
        return [stage for job in map(tracker.getJobInfo, ids) if job is not None for stage in job.stageIds]

    @contextmanager
    def tagged(self, tag: str) -> Iterator[None]:
        """Jobs that this thread starts inside the block have ``tag``, so that :meth:`cancel` ends them."""
        # In a classic session of Spark 4.3, interruptTag does not find the jobs of toArrow or collect.
        add, remove = (
            (self.spark.addTag, self.spark.removeTag)
            if self.connect
            else (self.spark.sparkContext.addJobTag, self.spark.sparkContext.removeJobTag)
        )
        add(tag)
        try:
            yield
        finally:
            remove(tag)

    def forget(self, checkpoint: Any) -> None:
        """Let the executors drop the rows of a local ``checkpoint``. With Spark Connect its end does that."""
        if not self.connect:
            # Its unpersist() would warn the user that nobody can compute the rows again.
            rdd = checkpoint._jdf.queryExecution().logical().rdd()
            self.spark.sparkContext._jsc.sc().unpersistRDD(rdd.id(), False)

    def cancel(self, tag: str) -> None:
        """Cancel the jobs with ``tag``; returns at once."""
        if self.connect:
            self.spark.interruptTag(tag)
        else:
            self.spark.sparkContext.cancelJobsWithTag(tag)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the block, :meth:`busy` also uses the progress reports of a Spark Connect server."""
        if not self.connect:
            yield
            return
        self.spark.registerProgressHandler(self._note)
        try:
            yield
        finally:
            self.spark.removeProgressHandler(self._note)

    def _note(self, stages: object, inflight_tasks: int, operation_id: str | None, done: bool) -> None:
        # Called in the thread that started the operation, which has the tags.
        self._tasks |= dict.fromkeys(self.spark.getTags(), 0 if done else inflight_tasks)

    def _slots(self) -> int:
        context = self.spark.sparkContext._jsc.sc()
        slots: int = context.maxNumConcurrentTasks(context.resourceProfileManager().defaultResourceProfile())
        return slots
