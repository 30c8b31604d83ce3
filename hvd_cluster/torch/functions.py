"""The same start on every rank: parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from collectives.api import InvalidRequestError
from hvd_cluster import basics
from hvd_cluster.objects import allgather_object, broadcast_object, described
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.torch.mpi_ops import broadcast_async_
from hvd_cluster.torch.operations.operands import synchronize_all

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]

Parameters: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]"


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite ``params`` in place with the parameters of the global rank ``root_rank``.

    A state dict or other mapping, ``model.named_parameters()``, a list of (name, tensor), or a list of tensors; named
    tensors are matched by name, others by position. None is skipped. InvalidRequestError for anything else, before
    anything is sent. HorovodInternalError when the ranks' tensors differ in shape or dtype, or a rank is lost.
    """
    handles = [broadcast_async_(tensor, root_rank, f"parameter.{name}", process_set) for name, tensor in _named(params)]
    synchronize_all(handles)


def _named(params: Parameters) -> list[tuple[str, torch.Tensor]]:
    pairs: list[tuple[Any, Any]]
    if isinstance(params, Mapping):
        pairs = sorted(params.items(), key=lambda pair: str(pair[0]))
    elif isinstance(params, str | torch.Tensor) or not isinstance(params, Iterable):
        raise InvalidRequestError(
            f"params is a {type(params).__name__}; give model.state_dict(), model.named_parameters() or a list"
        )
    else:
        pairs = [_as_pair(number, entry) for number, entry in enumerate(params)]
    return [(name, _require_tensor(name, value)) for name, value in pairs if value is not None]


def _as_pair(number: int, entry: Any) -> tuple[Any, Any]:
    return entry if isinstance(entry, tuple) and len(entry) == 2 else (number, entry)


def _require_tensor(name: Any, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidRequestError(
            f"params[{name!r}] is a {type(value).__name__}; only tensors are overwritten in place, other values go "
            "through broadcast_object"
        )
    return value


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give ``optimizer``, wrapped or not, the options and the state of the one on the global rank ``root_rank``.

    The optimizers of the ranks may have different state: a fresh optimizer takes a restored one's state, and the other
    way round. The root's structure travels first, as an object, and tells the others which tensors follow. ``model`` is
    accepted for compatibility and not needed. InvalidRequestError unless it is an optimizer, and on all ranks when the
    root's state cannot be read or pickled; ValueError if the number or the sizes of the parameter groups differ from
    the root's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidRequestError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer")
    is_root = basics.rank() == root_rank
    tensors: list[torch.Tensor] = []
    structure = _structure(optimizer, tensors) if is_root else None
    structure = broadcast_object(structure, root_rank, "optimizer.structure", process_set)
    if isinstance(structure, _Failure):
        raise InvalidRequestError(f"rank {root_rank}: {structure.text}") from structure.error
    state_dict = None if is_root else _mapped(structure, lambda leaf: _put_in(leaf, tensors))
    broadcast_parameters([(f"optimizer.{index}", each) for index, each in enumerate(tensors)], root_rank, process_set)
    if state_dict is not None:
        _load(optimizer, state_dict)


@dataclass(frozen=True)
class _Stub:
    """The place of a tensor that travels on its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Failure:
    """Why there is no structure: other ranks already wait for it. The ``error`` stays on the rank that raised it."""

    text: str
    error: BaseException | None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Failure, (self.text, None)


def _structure(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Any:
    """The state dict with a stub for each tensor that travels on its own; these tensors are added to ``tensors``."""
    try:
        return _mapped(optimizer.state_dict(), lambda leaf: _taken_out(leaf, tensors))
    except Exception as error:  # noqa: BLE001  code of the user: subclasses of optimizers, and hooks
        return _Failure(f"the state of the {type(optimizer).__name__} cannot be had ({described(error)})", error)


def _remade(value: Any, entries: list[Any]) -> Any:
    """A list or tuple like ``value`` of other entries."""
    return value._make(entries) if hasattr(value, "_make") else type(value)(entries)


def _plain(value: Any, entries: list[Any]) -> Any:
    """As :func:`_remade`, with plain tuples for named tuples, which torch's ``load_state_dict`` cannot make."""
    return tuple(entries) if isinstance(value, tuple) else type(value)(entries)


def _mapped(value: Any, change: Callable[[Any], Any], remake: Callable[[Any, list[Any]], Any] = _remade) -> Any:
    """``value`` with every leaf of its dicts, lists and tuples changed, in order."""
    if isinstance(value, dict):
        return {key: _mapped(entry, change, remake) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return remake(value, [_mapped(entry, change, remake) for entry in value])
    return change(value)


def _taken_out(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    """Tensors of any device travel through the host; numbers and sparse tensors stay in the structure."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    tensor = leaf.detach().cpu()
    if tensor.dim() == 0 or tensor.layout is not torch.strided:
        return tensor
    tensors.append(tensor)
    return _Stub(tuple(tensor.shape), torch.empty_like(tensor, device="meta").stride(), tensor.dtype)


def _put_in(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, _Stub):
        return leaf
    tensors.append(torch.empty_strided(leaf.shape, leaf.strides, dtype=leaf.dtype))
    return tensors[-1]


def _load(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """``load_state_dict`` without its change of dtype: the root's state may be float32 for bfloat16 parameters."""
    optimizer.load_state_dict({**state_dict, "state": _mapped(state_dict["state"], lambda leaf: leaf, _plain)})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        key = parameters[number] if isinstance(number, int) else number
        optimizer.state[key] = _on_devices_of(optimizer.state[key], state)


def _on_devices_of(loaded: Any, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(loaded.device)
    if isinstance(value, dict):
        return {key: _on_devices_of(loaded[key], entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return _remade(value, [_on_devices_of(*pair) for pair in zip(loaded, value, strict=True)])
    return value
