"""The log of a search: a CSV file with Horovod's columns, and ours behind them."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

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
OURS = ("patient", "patience_ms", "pipeline_piece")
COLUMNS = (*HOROVOD, *OURS)
"""Times in milliseconds, sizes in bytes, flags 0 or 1; the score in bytes per microsecond."""


class Journal:
    """Writes a row for each trial into the file at ``path``, which it replaces; "" for none.

    A file that cannot be written is logged once, and the search goes on without it. Each row is written at once.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._write("w", COLUMNS)

    def add(self, parameters: Parameters, score: float) -> None:
        """The job had ``score`` under ``parameters``."""
        row = _row(parameters, score)
        self._write("a", [row[name] for name in COLUMNS])

    def _write(self, mode: str, values: tuple[str, ...] | list[str]) -> None:
        if not self._path:
            return
        try:
            with Path(self._path).open(mode, newline="") as file:
                csv.writer(file, lineterminator="\n").writerow(values)
        except (OSError, ValueError) as error:
            logger.warning(
                "the log of autotuning cannot be written to %r: %s; give HOROVOD_AUTOTUNE_LOG a file where this user "
                "may write, with space; tuning goes on without a log",
                self._path,
                getattr(error, "strerror", None) or error,
            )
            self._path = ""


def _row(parameters: Parameters, score: float) -> dict[str, str]:
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
    }
