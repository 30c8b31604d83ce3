"""Checkpoints of Keras: ``hvd.checkpoint.save`` and ``hvd.checkpoint.load``, on all ranks and every backend.

The file of a checkpoint is one of ``model.save``, with the optimizer: ``hvd.load_model`` and
``keras.models.load_model`` make a model of it, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvd_cluster.keras.variables import build_optimizer, require_variables, settle
from hvd_cluster.storage import checkpoints
from hvd_cluster.storage.checkpoints import TIMEOUT, Checkpoint, Place, wait
from hvd_cluster.storage.folders import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load", "save", "wait"]

KIND = "keras"


def save(
    folder: Place,
    model: Any,
    *,
    step: int,
    extra: Any = None,
    epoch: int | None = None,
    metric: float | None = None,
    mode: str = "min",
    keep: int | None = 3,
    background: bool = False,
    timeout: float = TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint of ``model`` and its optimizer into ``folder``, from rank 0. All ranks call it.

    ``folder`` is a path on rank 0, or a URI of fsspec, for which ``storage_options`` are; ``extra`` is data that JSON
    can have. Afterwards the newest ``keep`` checkpoints stay, and the best: that with the least ``metric``, or the
    greatest with ``mode="max"``. None keeps all. No other job may write into the folder.

    With ``background`` the state is copied at once, in host memory, and a thread writes it; a call first waits for the
    write before, at most ``timeout`` seconds, and raises its error.

    Raises, on all ranks, InvalidRequestError for arguments of rank 0, and CheckpointError if it cannot write;
    HorovodInternalError when a rank is lost.
    """
    checkpoints.save(
        folder,
        lambda: _encoded(model),
        KIND,
        "keras",
        note=partial(checkpoints.noted, step, epoch, metric, mode, extra),
        keep=keep,
        background=background,
        timeout=timeout,
        storage_options=storage_options,
    )


def _encoded(model: Any) -> bytes:
    settle(model)
    require_variables(model)
    build_optimizer(model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        return path.read_bytes()


def load(
    folder: Place,
    model: Any,
    which: str | int = "latest",
    *,
    missing_ok: bool = False,
    timeout: float = TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """Give ``model``, which is built, and its optimizer the values of a checkpoint in ``folder``. All ranks call it.

    ``which`` is "latest", "best" or a step. Rank 0 reads the file and sends it to the others. The number of ranks may
    be another one than before. Returns step, epoch, metric, ``extra`` and the path; None where there is no checkpoint,
    if that is ``missing_ok``. A write in the background is waited for, at most ``timeout`` seconds.

    Raises CheckpointError where there is no such checkpoint, or where it is damaged; InvalidRequestError for a model
    that is not built, and Keras' own errors for another model.
    """
    found = checkpoints.load(
        folder, which, KIND, missing_ok=missing_ok, timeout=timeout, storage_options=storage_options
    )
    if found is None:
        return None
    checkpoint, data = found
    require_variables(model)
    build_optimizer(model)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model.keras"
        path.write_bytes(data)
        model.load_weights(path)
    return checkpoint
