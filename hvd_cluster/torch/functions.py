"""The same start on every rank: parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from collectives.api import InvalidRequestError
from hvd_cluster import basics
from hvd_cluster.objects import broadcast_object
from hvd_cluster.torch.mpi_ops import broadcast_async_, synchronize

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

Parameters: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]"


def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Overwrite ``params`` with those of rank ``root_rank``.

    A state dict or other mapping, ``model.named_parameters()``, a list of (name, tensor), or a list of tensors.
    Values that are not tensors are left alone. InvalidRequestError for anything else.
    """
    handles = [
        broadcast_async_(tensor, root_rank, name=f"parameter.{name}")
        for name, tensor in _named(params)
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Parameters) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            f"params is a {type(params).__name__}; give model.state_dict(), model.named_parameters() or a list"
        )
    return [_as_named(number, entry) for number, entry in enumerate(params)]


def _as_named(number: int, entry: Any) -> tuple[str, Any]:
    if isinstance(entry, torch.Tensor):
        return str(number), entry
    if isinstance(entry, tuple) and len(entry) == 2:
        return entry
    raise InvalidRequestError(f"params holds a {type(entry).__name__}; allowed are tensors and (name, tensor) pairs")


@dataclass(frozen=True)
class _Stub:
    """A tensor that travels on its own."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None) -> None:
    """Give ``optimizer`` the options and the state of the one on rank ``root_rank``.

    Ranks may differ in what they have: a fresh optimizer takes a restored one's state, and the other way round. The
    root's structure travels first, as an object, and tells the others which tensors follow. ``model`` is accepted for
    compatibility and not needed. InvalidRequestError for what is no optimizer, and for LBFGS, whose state is not a
    state dict of tensors.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidRequestError("cannot broadcast the state of torch.optim.LBFGS; build it after the broadcast")
    tensors: dict[str, torch.Tensor] = {}
    is_root = basics.rank() == root_rank
    skeleton = _without_tensors(optimizer.state_dict(), "optimizer", tensors) if is_root else None
    skeleton = broadcast_object(skeleton, root_rank, name="optimizer.structure")
    if not is_root:
        tensors = {stub.name: torch.empty(stub.shape, dtype=stub.dtype) for stub in _stubs(skeleton)}
    broadcast_parameters(tensors, root_rank)
    if not is_root:
        _load(optimizer, _with_tensors(skeleton, tensors))


def _load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """``load_state_dict`` without its change of dtype: the root's state may be float32 for bfloat16 parameters."""
    optimizer.load_state_dict(state_dict)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                loaded = optimizer.state[parameters[number]]
                loaded[key] = value.to(loaded[key].device)


def _without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return _Stub(name, tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return {key: _without_tensors(entry, f"{name}.{key}", tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(entry, f"{name}.{i}", tensors) for i, entry in enumerate(value))
    return value


def _stubs(value: Any) -> list[_Stub]:
    if isinstance(value, _Stub):
        return [value]
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [stub for entry in entries for stub in _stubs(entry)]


def _with_tensors(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, _Stub):
        return tensors[value.name]
    if isinstance(value, dict):
        return {key: _with_tensors(entry, tensors) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(entry, tensors) for entry in value)
    return value
