"""How rows come from a task of Spark into its worker; implemented by whoever knows what a worker does with rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from collectives.api import Store

if TYPE_CHECKING:
    import pyarrow

__all__ = ["Feed", "Feeder"]


class Feed(Protocol):
    """The rows of one task, on their way.

    The worker inherits ``descriptors`` and has ``environment`` among its variables, which tells it about them.
    """

    descriptors: Sequence[int]
    environment: Mapping[str, str]

    def feed(self, batches: Iterator[pyarrow.RecordBatch], stopped: Callable[[], bool]) -> None:
        """Take all ``batches``; called in the main thread of the task, once, while the worker runs.

        Returns early when ``stopped()``. Raises what is wrong with the rows, which is then the failure of this rank.
        """


class Feeder(Protocol):
    """Makes a :class:`Feed` in each task. It is pickled, as a part of what all tasks get."""

    def open(self, folder: str, rank: int, store: Store) -> AbstractContextManager[Feed]:
        """The feed of the task of ``rank``, entered before the worker starts.

        It may keep files in ``folder``, and tell those of other tasks something through the ``store`` of the job, which
        is up as long as any task.
        """
