"""Models, optimizers and functions on their way to the workers and back."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import torch

from hvd_cluster.spark.estimators.run import unreadable


def packed(value: Any) -> bytes:
    """``value``, with functions and classes of the main script; models and their optimizers stay together.

    Raises ValueError where it cannot be pickled.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer, pickle_module=cloudpickle, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise ValueError(
            f"the model, the optimizer or a function of the estimator cannot travel to the workers: {error}; let them "
            "have no locks, files, sockets or sessions in them"
        ) from error
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """The argument of :func:`packed`, on the CPU. It runs code, so ``data`` must come from a trusted place."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def checkpoint_bytes(checkpoint: Mapping[str, Any]) -> bytes:
    """A checkpoint of tensors, numbers, texts, lists and dictionaries."""
    buffer = io.BytesIO()
    torch.save(_plain(checkpoint), buffer)
    return buffer.getvalue()


def _plain(value: Any) -> Any:
    """``value`` with numbers of Python for those of NumPy, such as a learning rate, which would need code to load."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def checkpoint_of(data: bytes) -> dict[str, Any]:
    """The checkpoint in ``data``; runs no code of it. Raises ValueError where another estimator wrote it."""
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable("TorchEstimator", error) from error
    if not isinstance(found, dict) or not {"model", "optimizer"} <= found.keys():
        raise ValueError("the checkpoint of the run has no model and no optimizer in it; give another run_id")
    return found


def on_cpu(value: Any) -> Any:
    """A copy of a nested state on the CPU, which later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: on_cpu(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [on_cpu(each) for each in value]
    return copy.deepcopy(value)


def optimizer_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
    """``optimizer`` if it works on parameters of ``model``; otherwise a copy that does, with its groups and state.

    The parameters of another model stand for those of ``model`` in the same places. Raises ValueError where they
    differ in number or shape.
    """
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    own = list(model.parameters())
    if {id(each) for each in given} <= {id(each) for each in own}:
        return optimizer
    if [each.shape for each in given] != [each.shape for each in own]:
        raise ValueError(
            f"the optimizer has {len(given)} parameters, which are not those of the model, which has {len(own)}; make "
            "the optimizer from the parameters of the model that the estimator gets"
        )
    places = {id(old): new for old, new in zip(given, own, strict=True)}
    # As its memo, so that the copy refers to the parameters of the model; their state comes along.
    return copy.deepcopy(optimizer, {key: new for key, new in places.items()})
