"""How models and optimizers are kept and sent."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch

from collectives import InvalidRequestError, override
from hvd_cluster.elastic.handlers import SnapshotHandler
from hvd_cluster.ops.structures import mapped, paired
from hvd_cluster.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvd_cluster.torch.optimizer.inventory import parameter_groups
from hvd_cluster.torch.optimizer.sharded import ShardedOptimizer
from hvd_cluster.torch.optimizer.transfers import is_shared

__all__ = ["ModelStateHandler", "OptimizerStateHandler"]


class ModelStateHandler(SnapshotHandler):
    """For modules: parameters are heavy; buffers and other values of the state dict are light."""

    value: torch.nn.Module

    @override
    def light(self) -> dict[str, Any]:
        values = self.value.state_dict(keep_vars=True).items()
        return {name: _cloned(value) for name, value in values if not isinstance(value, torch.nn.Parameter)}

    @override
    def put_light(self, light: dict[str, Any]) -> None:
        if light:
            self.value.load_state_dict(copy.deepcopy(light), strict=False)

    @override
    def heavy(self, earlier: list[torch.Tensor] | None) -> list[torch.Tensor]:
        tensors = [parameter.detach() for parameter in self.value.parameters()]
        if earlier is None or not _fit(earlier, tensors):
            return [tensor.clone() for tensor in tensors]
        torch._foreach_copy_(earlier, tensors)
        return earlier

    @override
    def put_heavy(self, heavy: list[torch.Tensor]) -> None:
        torch._foreach_copy_([parameter.detach() for parameter in self.value.parameters()], heavy)

    @override
    def versions(self) -> int:
        return sum([parameter._version for parameter in self.value.parameters()])

    @override
    def layout(self) -> list[tuple[str, str]]:
        return [(name, _description(parameter)) for name, parameter in self.value.named_parameters()]

    @override
    def share(self, root_rank: int) -> None:
        broadcast_parameters(list(self.value.named_parameters()), root_rank)
        self.share_light(root_rank)

    @override
    def share_light(self, root_rank: int) -> None:
        self.share_structure("buffers", root_rank)

    @override
    def forget(self) -> None:
        _drop_gradients(self.value.parameters())


class OptimizerStateHandler(SnapshotHandler):
    """For optimizers, wrapped or not: options of the groups are light, the state of each parameter is heavy."""

    value: torch.optim.Optimizer

    def __init__(self, value: torch.optim.Optimizer) -> None:
        if isinstance(value, ShardedOptimizer):
            raise InvalidRequestError(
                "a sharded optimizer cannot be in the state of an elastic job: the part of a lost rank would be lost; "
                "leave out sharded"
            )
        super().__init__(value)

    @override
    def light(self) -> list[dict[str, Any]]:
        return [
            {name: _cloned(value) for name, value in group.items() if name != "params"}
            for group in self.value.param_groups
        ]

    @override
    def put_light(self, light: list[dict[str, Any]]) -> None:
        for group, saved in zip(self.value.param_groups, copy.deepcopy(light), strict=False):
            group.update(saved)

    @override
    def heavy(self, earlier: dict[Any, Any] | None) -> dict[Any, Any]:
        earlier = earlier or {}
        return {key: _copied(state, earlier.get(key)) for key, state in self.value.state.items()}

    @override
    def put_heavy(self, heavy: dict[Any, Any]) -> None:
        self.value.state.clear()
        self.value.state.update({key: mapped(state, _cloned) for key, state in heavy.items()})

    @override
    def layout(self) -> list[tuple[str, str]]:
        kind = type(self.value).__name__
        return [
            (f"{kind} group {number} parameter {index}", _description(parameter))
            for number, group in enumerate(parameter_groups(self.value))
            for index, parameter in enumerate(group)
        ]

    @override
    def share(self, root_rank: int) -> None:
        broadcast_optimizer_state(self.value, root_rank)

    @override
    def share_light(self, root_rank: int) -> None:
        self.share_structure("options", root_rank)

    @override
    def forget(self) -> None:
        discard = getattr(self.value, "_discard", None)
        if discard is not None:
            discard()
        for group in parameter_groups(self.value):
            _drop_gradients(group)


def _description(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}".removeprefix("torch.")


def _fit(copies: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    return len(copies) == len(tensors) and all(map(_fits, copies, tensors))


def _fits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (first.shape, first.dtype, first.device) == (second.shape, second.dtype, second.device)


def _cloned(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)


def _copied(state: Any, earlier: Any) -> Any:
    """A copy of the state of a parameter, in the memory of an earlier one of the same structure."""
    try:
        return paired(state, earlier, _into)
    except (KeyError, TypeError, ValueError):  # another structure
        return mapped(state, _cloned)


def _into(leaf: Any, earlier: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and isinstance(earlier, torch.Tensor) and _fits(leaf, earlier):
        return earlier.copy_(leaf)
    return _cloned(leaf)


@torch.no_grad()
def _drop_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """A gradient in memory that the user holds, such as one large buffer of all gradients, stays there as zeros."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.layout is torch.strided and is_shared(gradient):
            gradient.zero_()
        else:
            parameter.grad = None
