"""The same start on every rank: parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from collectives import InvalidRequestError
from hvd_cluster.comparison.meeting import matched, refusing_list
from hvd_cluster.core import basics, seeds
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.ops.objects import allgather_object, broadcast_object
from hvd_cluster.ops.structures import broadcast_structure, mapped, named, paired, plain
from hvd_cluster.torch.mpi_ops import broadcast_async_
from hvd_cluster.torch.operations.calls import run_all
from hvd_cluster.torch.optimizer.gradient_optimizer import HookedOptimizer
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "clip_grad_norm_",
    "full_state_dict",
    "set_seed",
]

Parameters: TypeAlias = "Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]"


def broadcast_parameters(params: Parameters, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite ``params`` in place with the parameters of the global rank ``root_rank``.

    A state dict or other mapping, ``model.named_parameters()``, a list of (name, tensor), or a list of tensors; named
    tensors are matched by name, others by position. None is skipped. InvalidRequestError for anything else, before
    anything is sent. MismatchError, on all ranks and before anything is sent, where their tensors differ: it names the
    first difference. Where only names differ, such as "module.weight" and "weight", tensors are matched by position.
    HorovodInternalError when a rank is lost. After an error the call may be repeated.
    """
    with refusing_list("broadcast_parameters", process_set):
        tensors = named(params, torch.Tensor, "give model.state_dict(), model.named_parameters() or a list")
    _broadcast(matched(tensors, "broadcast_parameters", process_set), root_rank, process_set)


def _broadcast(tensors: Iterable[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet) -> None:
    run_all(partial(broadcast_async_, each, root_rank, f"parameter.{name}", process_set) for name, each in tensors)


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
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.give_way(root_rank)
    tensors: list[torch.Tensor] = []

    def structure() -> Any:
        return mapped(optimizer.state_dict(), lambda leaf: _taken_out(leaf, tensors))

    subject = f"the state of the {type(optimizer).__name__}"
    shared = broadcast_structure(structure, subject, root_rank, "optimizer.structure", process_set)
    state_dict = None if basics.rank() == root_rank else mapped(shared, lambda leaf: _put_in(leaf, tensors))
    _broadcast([(f"optimizer.{index}", each) for index, each in enumerate(tensors)], root_rank, process_set)
    if state_dict is not None:
        _load(optimizer, state_dict)


def full_state_dict(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> dict[str, Any] | None:
    """``optimizer.state_dict()`` on the global rank ``root_rank``, None on the others; all ranks call it.

    The result is in the format of the optimizer that was wrapped, also with ``sharded``: a plain optimizer loads it,
    and one on any number of ranks. InvalidRequestError unless ``root_rank`` is in the optimizer's process set.
    """
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict_on(root_rank)
    return optimizer.state_dict() if basics.rank() == root_rank else None


def set_seed(seed: int, *, same: bool = False) -> int:
    """Seed ``random``, NumPy and torch, on the CPU and all GPUs. Returns the seed of this rank, below 2**32.

    Each rank gets another seed, made of ``seed`` and its rank, or ``seed`` itself if it is the ``same`` on all ranks. A
    run with the same seed and number of ranks draws the same numbers. Call it again after a reset of an elastic job,
    where ranks change. Generators that exist keep their state: give ``torch.Generator().manual_seed(...)`` the result.
    Workers that a DataLoader starts later get seeds from torch's, also for ``random`` and NumPy; algorithms stay as
    deterministic as they were. InvalidRequestError unless ``seed`` is an integer from 0 to 2**32 - 1,
    NotInitializedError before ``init()``, unless it is the ``same``.
    """
    return seeds.set_seed(seed, same, torch.manual_seed)


def clip_grad_norm_(
    target: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the combined gradients of an optimizer, between ``backward()`` and ``step()``, as torch's function does.

    A DistributedOptimizer combines its gradients first, and ``step()`` does not combine them again. For parameters this
    is torch's function: call ``synchronize()`` before. Returns the norm of all gradients before they were clipped. The
    other arguments are those of :func:`torch.nn.utils.clip_grad_norm_`.
    """
    parameters: Any = target
    if isinstance(target, torch.optim.Optimizer):
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        if isinstance(target, HookedOptimizer):
            target.combine_for_step()
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


@dataclass(frozen=True)
class _Stub:
    """The place of a tensor that travels on its own."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


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
    """``load_state_dict`` without its change of dtype: the root's state may be float32 for bfloat16 parameters.

    It cannot make named tuples, so it gets plain ones.
    """
    optimizer.load_state_dict({**state_dict, "state": mapped(state_dict["state"], lambda leaf: leaf, plain)})
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in state_dict["state"].items():
        key = parameters[number] if isinstance(number, int) else number
        optimizer.state[key] = paired(state, optimizer.state[key], _on_device_of)


def _on_device_of(value: Any, loaded: Any) -> Any:
    return value.to(loaded.device) if isinstance(value, torch.Tensor) else value
