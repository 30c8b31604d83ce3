"""What travels from the driver to all tasks, and how outcomes travel back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from executors.api import JobSecret
from executors.spark.feeding import Feeder

__all__ = ["DEVICES", "SCHEMA", "Plan", "join", "parts"]

SCHEMA = "rank long, part long, data binary"
DEVICES = "_HOROVOD_SPARK_DEVICES"
"""The variable that tells a worker which GPUs Spark assigned to it."""

PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    """The same for all tasks of a stage.

    ``call`` is what :func:`executors.call.pickle_call` makes. ``console`` has the addresses and the port of the driver.
    ``environment`` is added to that of the task and of the job. ``search_path`` changes the PYTHONPATH of the workers.
    ``executable`` is their Python, where it is not that of the tasks. They have ``start_timeout`` seconds to come up,
    and ``grace`` seconds between being asked to end and being killed.
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


def parts(data: bytes) -> Iterator[bytes]:
    """``data`` in parts that fit into rows: at least one, though it be empty."""
    for start in range(0, max(1, len(data)), PART_BYTES):
        yield data[start : start + PART_BYTES]


def join(rows: Sequence[tuple[int, int, bytes]]) -> dict[int, bytes]:
    """What each rank cut into parts, from rows of :data:`SCHEMA` in any order."""
    found: dict[int, list[bytes]] = {}
    for rank, _, data in sorted(rows, key=lambda row: row[:2]):
        found.setdefault(rank, []).append(data)
    return {rank: b"".join(pieces) for rank, pieces in found.items()}
