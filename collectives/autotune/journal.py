"""The log of a search: a CSV file with Horovod's columns, and ours behind them."""

from __future__ import annotations

import csv
import fcntl
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

from collectives.parameters import Parameters

__all__ = ["COLUMNS", "Journal"]

logger = logging.getLogger(__name__)

HOROVOD = (
    "hierarchical_allreduce",
    "hierarchical_allgather",
    "torus_allreduce",
    "cache_enabled",
    "cycle_time_ms",
    "tensor_fusion_threshold",
    "score",
)
OURS = ("patient", "patience_ms", "pipeline_piece", "choice")
COLUMNS = (*HOROVOD, *OURS)
"""Times in milliseconds, sizes in bytes, flags 0 or 1; the score in bytes per microsecond."""


class Journal:
    """Writes a row for each trial into the file at ``path``, at once; "" for none.

    The file is replaced, unless it ``goes_on``. A file that cannot be written, or to which another job writes, is
    logged once, and the search goes on without it.
    """

    def __init__(self, path: str, goes_on: bool = False) -> None:
        self._path = path
        self._file: IO[str] | None = None
        if path:
            self._attempt(lambda: self._open(goes_on))

    def _open(self, goes_on: bool) -> None:
        self._file = file = open(self._path, "a", newline="")  # noqa: SIM115 - it stays open
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OSError("another job writes to it") from error
        if not goes_on:
            file.truncate(0)
            self._write(COLUMNS)

    def add(self, parameters: Parameters, score: float, is_choice: bool = False) -> None:
        """The job had ``score`` under ``parameters``, which ``is_choice`` says are those that it keeps."""
        row = _row(parameters, score, is_choice)
        self._attempt(lambda: self._write([row[name] for name in COLUMNS]))

    def _write(self, values: Sequence[str]) -> None:
        if self._file is not None:
            csv.writer(self._file, lineterminator="\n").writerow(values)
            self._file.flush()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ValueError) as error:
            logger.warning(
                "the log of autotuning cannot be written to %r: %s; give HOROVOD_AUTOTUNE_LOG a file of this job where "
                "this user may write, with space; tuning goes on without a log",
                self._path,
                getattr(error, "strerror", None) or error,
            )
            self.close()

    def close(self) -> None:
        """Release the file."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # what it could not write
                file.close()


def _row(parameters: Parameters, score: float, is_choice: bool) -> dict[str, str]:
    return {
        "hierarchical_allreduce": f"{parameters.hierarchical_allreduce:d}",
        "hierarchical_allgather": f"{parameters.hierarchical_allgather:d}",
        "torus_allreduce": "0",
        "cache_enabled": f"{parameters.cache_capacity > 0:d}",
        "cycle_time_ms": f"{parameters.cycle_time * 1e3:g}",
        "tensor_fusion_threshold": str(parameters.fusion_threshold),
        "score": f"{score:.6g}",
        "patient": f"{parameters.patient:d}",
        "patience_ms": f"{parameters.patience * 1e3:g}",
        "pipeline_piece": str(parameters.pipeline_piece),
        "choice": f"{is_choice:d}",
    }
