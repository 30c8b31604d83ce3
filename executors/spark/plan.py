"""The plan that travels from the driver to all tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from executors.api import JobSecret
from executors.spark.feeding import Feeder

__all__ = ["DEVICES", "Plan"]

DEVICES = "_HOROVOD_SPARK_DEVICES"
"""The variable that tells a worker which GPUs Spark assigned to it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan that all tasks of a stage get.

    ``call`` is the result of :func:`executors.call.pickle_call`, and refers to ``broadcasts``. ``console`` has the
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
