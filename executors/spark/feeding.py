"""How rows get from a task of Spark into its worker: the protocols that an implementation for a kind of rows has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from collectives.api import Store

if TYPE_CHECKING:
    import pyarrow

__all__ = ["PARTITION", "Feed", "Feeder", "FeedingTask"]

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
