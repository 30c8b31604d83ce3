"""The log of a search: a CSV file with Horovod's columns, and ours behind them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from collectives.api import Parameters
from collectives.observe.locked_file import LockedFile

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

    The file is replaced, unless it ``goes_on``; then it is opened for the first row, because a lost rank 0 may hold it
    until its process has ended. A file that cannot be written, or to which another job writes, is logged once, and the
    search goes on without it.
    """

    def __init__(self, path: str, goes_on: bool = False) -> None:
        self._path = path
        self._file: LockedFile | None = None
        self._goes_on = goes_on
        self._is_open = not path
        if not goes_on:
            self._attempt(self._open)

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        try:
            self._file = file = LockedFile(self._path, appends=True)
        except BlockingIOError as error:
            raise OSError("another job writes to it") from error
        if not self._goes_on:
            os.ftruncate(file.descriptor, 0)
        if not os.fstat(file.descriptor).st_size:
            self._write(COLUMNS)

    def add(self, parameters: Parameters, score: float, is_choice: bool = False) -> None:
        """The job had ``score`` under ``parameters``, which ``is_choice`` says are those that it keeps."""
        row = _row(parameters, score, is_choice)
        self._attempt(self._open)
        self._attempt(lambda: self._write([row[name] for name in COLUMNS]))

    def _write(self, values: Sequence[str]) -> None:
        if self._file is None:
            return
        file = self._file.descriptor
        before, rest = os.fstat(file).st_size, (",".join(values) + "\n").encode()
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            with suppress(OSError):  # a device
                os.ftruncate(file, before)
            raise

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
        """Release the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def disown(self) -> None:
        """In a forked child: close this copy of the file."""
        if self._file is not None:
            self._file.disown()


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
