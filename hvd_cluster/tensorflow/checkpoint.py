"""Checkpoints of TensorFlow: ``hvd.checkpoint.save`` and ``hvd.checkpoint.load``, in eager mode, on all ranks.

The file of a checkpoint is a zip archive of what ``tf.train.Checkpoint(**objects).write("objects")`` writes.
"""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_cluster.storage import checkpoints
from hvd_cluster.storage.checkpoints import TIMEOUT, Checkpoint, Place, wait
from hvd_cluster.storage.folders import CheckpointError

__all__ = ["Checkpoint", "CheckpointError", "load", "save", "wait"]

KIND = "tensorflow"
PREFIX = "objects"


def save(
    folder: Place,
    objects: Mapping[str, Any],
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
    """Write a checkpoint of ``objects`` by name into ``folder``, from rank 0. All ranks call it, in eager mode.

    The objects are what ``tf.train.Checkpoint`` takes: models, optimizers, variables, modules. ``folder`` is a path on
    rank 0, or a URI of fsspec, for which ``storage_options`` are; ``extra`` is data that JSON can have. Afterwards the
    newest ``keep`` checkpoints stay, and the best: that with the least ``metric``, or the greatest with ``mode="max"``.
    None keeps all. No other job may write into the folder.

    With ``background`` the state is copied at once, in host memory, and a thread writes it; a call first waits for the
    write before, at most ``timeout`` seconds, and raises its error.

    Raises, on all ranks, InvalidRequestError for arguments of rank 0, and CheckpointError if it cannot write;
    HorovodInternalError when a rank is lost.
    """
    checkpoints.save(
        folder,
        lambda: _encoded(objects),
        KIND,
        "zip",
        note=partial(checkpoints.noted, step, epoch, metric, mode, extra),
        keep=keep,
        background=background,
        timeout=timeout,
        storage_options=storage_options,
    )


def _encoded(objects: Mapping[str, Any]) -> memoryview:
    file = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file, "w") as archive:
        tf.train.Checkpoint(**objects).write(str(Path(folder) / PREFIX))
        for path in sorted(Path(folder).iterdir()):
            archive.write(path, path.name)
    return file.getbuffer()


def load(
    folder: Place,
    objects: Mapping[str, Any],
    which: str | int = "latest",
    *,
    missing_ok: bool = False,
    timeout: float = TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """Give ``objects`` the values of a checkpoint in ``folder``. All ranks call it, in eager mode.

    ``which`` is "latest", "best" or a step. Rank 0 reads the file and sends it to the others. The number of ranks may
    be another one than before. The objects have all their variables: call
    ``optimizer.build(model.trainable_variables)`` before. Returns step, epoch, metric, ``extra`` and the path; None
    where there is no checkpoint, if that is ``missing_ok``. A write in the background is waited for, at most
    ``timeout`` seconds.

    Raises CheckpointError where there is no such checkpoint, where it is damaged, and where it has other variables than
    ``objects``; then none has changed.
    """
    found = checkpoints.load(
        folder, which, KIND, missing_ok=missing_ok, timeout=timeout, storage_options=storage_options
    )
    if found is None:
        return None
    checkpoint, data = found
    with tempfile.TemporaryDirectory() as scratch:
        zipfile.ZipFile(io.BytesIO(data)).extractall(scratch)
        _restore(objects, Path(scratch), checkpoint.path)
    return checkpoint


def _restore(objects: Mapping[str, Any], scratch: Path, path: str) -> None:
    """The file is gone soon, so no variable may wait for its value until it is made: all names are compared before."""
    checkpoint = tf.train.Checkpoint(**objects)
    own, saved = _names(checkpoint.write(str(scratch / "own"))), _names(str(scratch / PREFIX))
    if own != saved:
        raise CheckpointError(
            f"{path} has {len(saved)} variables, but {sorted(objects)} have {len(own)}, or others under other names; "
            "give the objects that hvd.checkpoint.save got, under the same names, and make their variables first: call "
            "a model on a batch, and optimizer.build(model.trainable_variables)"
        )
    checkpoint.read(str(scratch / PREFIX)).assert_consumed()


def _names(prefix: str) -> set[str]:
    return {name for name, _ in tf.train.list_variables(prefix)} - {"_CHECKPOINTABLE_OBJECT_GRAPH"}
