"""Curves in TensorBoard and MLflow, written by rank 0. Both libraries are imported when they are used."""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

from hvd_cluster.core import basics
from hvd_cluster.ops.objects import described
from hvd_cluster.reports.metrics_reader import metrics

logger = logging.getLogger(__name__)

TENSORBOARD = ("tensorboard", "tensorboardX")
"""Either of these packages writes the files."""


class ScalarWriter(Protocol):
    """The part of a SummaryWriter that is used."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Write a point of the curve ``tag``."""

    def flush(self) -> object:
        """Let readers see all points."""

    def close(self) -> object:
        """Flush, and end the writer's thread."""


class MetricLogger:
    """Logs the averages of all ranks to TensorBoard, to MLflow, or to both, from rank 0::

        with hvd.MetricLogger(tensorboard="logs") as curves:
            curves.log({"loss": loss}, step, samples=len(batch))

    ``tensorboard`` is the folder of the event files on rank 0, or an object with ``add_scalar``, ``flush`` and
    ``close``, such as a SummaryWriter. ``mlflow`` logs to the active run of rank 0; MLflow starts one where there is
    none. ``prefix`` goes before each name. Each rank makes one. ImportError, which names the pip command, on a rank
    without the library: any rank may become rank 0 of an elastic job.
    """

    def __init__(
        self, tensorboard: str | os.PathLike[str] | ScalarWriter | None = None, mlflow: bool = False, prefix: str = ""
    ) -> None:
        self._folder: str | None = None
        self._writer: ScalarWriter | None = None
        if isinstance(tensorboard, str | os.PathLike):
            _require("TensorBoard", *TENSORBOARD)
            self._folder = os.fspath(tensorboard)
        else:
            self._writer = tensorboard
        if mlflow:
            _require("MLflow", "mlflow")
        self._mlflow = mlflow
        self._prefix = prefix

    def log(self, values: Mapping[str, Any], step: int, samples: float = 1) -> dict[str, float]:
        """Average ``values`` over all ranks, and write them at ``step`` on rank 0. All ranks call it.

        Returns the averages. ``samples`` and errors are those of ``hvd.metrics.average``; an empty dict goes with
        ``samples=0``. A point that cannot be written, such as where a server is down, is a warning in the log of rank
        0, and the training goes on.
        """
        found: dict[str, float] = metrics.average(dict(values), samples, name="metric_logger")
        if basics.rank() == 0:
            self._write({f"{self._prefix}{name}": value for name, value in found.items()}, step)
        return found

    def _write(self, values: Mapping[str, float], step: int) -> None:
        for write in (self._to_tensorboard, self._to_mlflow):
            try:
                write(values, step)
            except Exception as error:  # noqa: BLE001  of the library, or of a server: curves are worth no training
                logger.warning("the metrics of step %d are not logged (%s)", step, described(error))

    def _to_tensorboard(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None and self._folder is not None:
            self._writer = _open(self._folder)
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def _to_mlflow(self, values: Mapping[str, float], step: int) -> None:
        if self._mlflow:
            importlib.import_module("mlflow").log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the writer of TensorBoard; a later ``log`` begins another file. The run of MLflow stays active."""
        writer = self._writer
        if self._folder is not None:
            self._writer = None
        if writer is not None:
            writer.close()

    def __enter__(self) -> MetricLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _require(what: str, *packages: str) -> None:
    if not any(map(_is_there, packages)):
        raise ImportError(f"the metrics go to {what}, but it is not installed here: pip install {packages[0]}")


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module without a spec, in sys.modules
        return True


def _open(folder: str) -> ScalarWriter:
    if _is_there(TENSORBOARD[0]):
        return _EventFile(folder)
    writer: ScalarWriter = importlib.import_module(TENSORBOARD[1]).SummaryWriter(folder)
    return writer


class _EventFile:
    """The writer of the package tensorboard, which needs no framework."""

    def __init__(self, folder: str) -> None:
        proto = "tensorboard.compat.proto"
        self._event = importlib.import_module(f"{proto}.event_pb2").Event
        self._summary = importlib.import_module(f"{proto}.summary_pb2").Summary
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._file = writer.EventFileWriter(folder)

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        point = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._file.add_event(self._event(wall_time=time.time(), step=step, summary=point))

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
