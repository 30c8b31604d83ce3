"""The plan that travels from the driver to all tasks, the options of a job, and how rows get into a worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from collectives import Store
from executors.agents.local.supervisor import GRACE_SECONDS
from executors.api import JobSecret

if TYPE_CHECKING:
    import pyarrow

    from executors.dashboard.picture import Address


PARTITION = "HVD_CLUSTER_SPARK_PARTITION"
"""The variable with the number of the partition whose rows a worker of an elastic job gets."""


@dataclass(frozen=True, slots=True)
class FeedingTask:
    """The task of ``rank``, one of ``size``.

    It may keep files in ``folder``. The ``store`` of the job reaches the other tasks for as long as any of them runs.
    ``warn`` shows a line to the user of the driver.
    """

    rank: int
    size: int
    folder: str
    store: Store
    warn: Callable[[str], None]


class Feed(Protocol):
    """The rows of one task, on their way.

    The worker inherits ``descriptors`` and has ``environment`` among its variables, which tells it about them.
    """

    descriptors: Sequence[int]
    environment: Mapping[str, str]

    def feed(self, batches: Iterator[pyarrow.RecordBatch], stopped: Callable[[], bool]) -> None:
        """Take all ``batches``; called in the main thread of the task, once, while the worker runs.

        Returns early when ``stopped()``. Raises the error found in the rows; it is then the failure of this rank.
        """


class Feeder(Protocol):
    """Makes a :class:`Feed` in each task. It is pickled, as a part of the plan that all tasks get."""

    def open(self, task: FeedingTask) -> AbstractContextManager[Feed]:
        """The feed of ``task``, entered before the worker starts."""


@dataclass(frozen=True, slots=True)
class SparkOptions:
    """How to run a job: see :class:`.plan.Plan`. With ``verbose`` the driver prints the host of each rank.

    ``dashboard`` is where the live page is served; None: there is none.
    """

    start_timeout: float
    environment: Mapping[str, str] = field(default_factory=dict)
    nics: tuple[str, ...] = ()
    executable: str | None = None
    search_path: Callable[[str], str] | None = None
    feeder: Feeder | None = None
    grace: float = GRACE_SECONDS
    verbose: bool = False
    dashboard: Address | None = None


DEVICES = "_HOROVOD_SPARK_DEVICES"
"""The variable that tells a worker which GPUs Spark assigned to it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that all tasks of a stage get.

    ``call`` is the result of :func:`executors.job.call.pickle_call`, and refers to ``broadcasts``. ``console`` has the
    driver's addresses and port. ``environment`` is added to that of the task and of the job. ``search_path`` changes
    the PYTHONPATH of the workers. ``executable`` is the Python of the workers; None means that of the tasks. Workers
    must start within ``start_timeout`` seconds. They have ``grace`` seconds between the request to end and SIGKILL. The
    job was ``requested`` then, in seconds since the epoch by the clock of the driver.
    """

    call: bytes = field(repr=False)
    size: int
    secret: JobSecret
    console: tuple[Sequence[str], int]
    environment: Mapping[str, str]
    nics: tuple[str, ...]
    executable: str | None
    start_timeout: float
    grace: float
    search_path: Callable[[str], str] | None
    feeder: Feeder | None
    requested: float = 0.0
    broadcasts: tuple[Any, ...] = ()
