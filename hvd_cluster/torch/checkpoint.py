"""Checkpoints of torch: ``hvd.checkpoint.save`` and ``hvd.checkpoint.load``, on all ranks.

The file of a checkpoint is one of ``torch.save``: a dict of state dicts under "model", "optimizer" and "scheduler", and
what was given as ``extra``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from collectives import InvalidRequestError
from hvd_cluster.storage import checkpoints
from hvd_cluster.storage.checkpoints import TIMEOUT, Checkpoint, Place, wait
from hvd_cluster.storage.folders import CheckpointError
from hvd_cluster.torch.functions import full_state_dict

__all__ = ["Checkpoint", "CheckpointError", "load", "save", "wait"]

KIND = "torch"


def save(
    folder: Place,
    *,
    step: int,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    extra: Any = None,
    epoch: int | None = None,
    metric: float | None = None,
    mode: str = "min",
    keep: int | None = 3,
    background: bool = False,
    timeout: float = TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint into ``folder``, from the state of rank 0. All ranks call it.

    ``folder`` is a path on rank 0, or a URI of fsspec, for which ``storage_options`` are. ``model``, ``optimizer``,
    also one that is sharded over the ranks, and ``scheduler`` are objects with ``state_dict()``; ``extra`` is plain
    data and tensors. Afterwards the newest ``keep`` checkpoints stay, and the best: that with the least ``metric``, or
    the greatest with ``mode="max"``. None keeps all. No other job may write into the folder.

    With ``background`` the state is copied at once, in host memory, and a thread writes it; a call first waits for the
    write before, at most ``timeout`` seconds, and raises its error.

    Raises, on all ranks, InvalidRequestError for arguments of rank 0, and CheckpointError if it cannot write;
    HorovodInternalError when a rank is lost.
    """
    own = None if optimizer is None else full_state_dict(optimizer)
    checkpoints.save(
        folder,
        lambda: _encoded(model, own, scheduler, extra),
        KIND,
        "pt",
        note=partial(checkpoints.noted, step, epoch, metric, mode),
        keep=keep,
        background=background,
        timeout=timeout,
        storage_options=storage_options,
    )


def _encoded(model: Any, optimizer: Mapping[str, Any] | None, scheduler: Any, extra: Any) -> memoryview:
    states = {"optimizer": optimizer, "extra": extra}
    states |= {
        name: part.state_dict() for name, part in (("model", model), ("scheduler", scheduler)) if part is not None
    }
    file = io.BytesIO()
    torch.save(states, file)
    return file.getbuffer()


def load(
    folder: Place,
    which: str | int = "latest",
    *,
    model: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    missing_ok: bool = False,
    weights_only: bool = True,
    timeout: float = TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """Give the objects the state of a checkpoint in ``folder``. All ranks call it, and end with equal states.

    ``which`` is "latest", "best" or a step. Rank 0 reads the file and sends it to the others. The number of ranks may
    be another one than before. Returns step, epoch, metric, ``extra`` and the path; None where there is no checkpoint,
    if that is ``missing_ok``, and in a newcomer of an elastic job, which gets the state of the others when its function
    runs. A write in the background is waited for, at most ``timeout`` seconds.

    Raises CheckpointError where there is no such checkpoint, where it is damaged or lacks a state that is asked for,
    and where it has classes besides tensors and plain data: ``weights_only=False`` loads them, which runs code of the
    file. Errors of ``load_state_dict``, such as for another model, are torch's.
    """
    found = checkpoints.load(
        folder, which, KIND, missing_ok=missing_ok, timeout=timeout, storage_options=storage_options
    )
    if found is None:
        return None
    checkpoint, data = found
    states = _decoded(data, checkpoint.path, weights_only)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    wanted = {name: part for name, part in parts.items() if part is not None}
    _require(wanted, states, checkpoint.path)
    for name, part in wanted.items():
        part.load_state_dict(states[name])
    return replace(checkpoint, extra=states["extra"])


def _decoded(data: bytes, path: str, weights_only: bool) -> dict[str, Any]:
    try:
        states: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} has classes besides tensors and plain data ({str(error).splitlines()[0]}); if you trust all who "
            "may write there, load it with weights_only=False"
        ) from error
    return states


def _require(wanted: Mapping[str, Any], states: Mapping[str, Any], path: str) -> None:
    missing = [name for name in wanted if states.get(name) is None]
    if missing:
        raise CheckpointError(
            f"{path} has no state of the {' and the '.join(missing)}; give it to hvd.checkpoint.save, or leave it out "
            "here"
        )
    strangers = [name for name, part in wanted.items() if not hasattr(part, "load_state_dict")]
    if strangers:
        raise InvalidRequestError(f"{strangers} have no load_state_dict(); give objects of torch, not their states")
