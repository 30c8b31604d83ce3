"""How models and optimizers are kept and sent."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from collectives import InvalidRequestError, override
from hvd_cluster.core import basics
from hvd_cluster.elastic.handlers import SnapshotHandler
from hvd_cluster.ops.rank_copies import Bytes, Kept, RowId
from hvd_cluster.ops.structures import mapped, paired
from hvd_cluster.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvd_cluster.torch.optimizer.inventory import parameter_groups
from hvd_cluster.torch.optimizer.shard import own_memory
from hvd_cluster.torch.optimizer.sharded import KeptState, ShardedOptimizer
from hvd_cluster.torch.optimizer.transfers import is_shared

__all__ = ["ModelStateHandler", "OptimizerStateHandler"]


class ModelStateHandler(SnapshotHandler):
    """For modules: parameters are heavy; buffers and other values of the state dict are light."""

    value: torch.nn.Module

    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value)
        self._left_out: set[str] = set()

    @override
    def light(self) -> dict[str, Any]:
        values = self.value.state_dict(keep_vars=True).items()
        return {name: _cloned(value) for name, value in values if not isinstance(value, torch.nn.Parameter)}

    @override
    def put_light(self, light: dict[str, Any]) -> None:
        if light:
            self.value.load_state_dict(copy.deepcopy(light), strict=False)

    @override
    def require_replaceable(self) -> None:
        if self._left_out:
            raise _not_replaceable("model")

    @override
    def leave_out(self, included: Sequence[object]) -> None:
        numbers = set(map(id, included))
        self._left_out = {name for name, each in self.value.named_parameters() if id(each) in numbers}

    @override
    def heavy(self, earlier: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """By name; without the parameters that are parts of a sharded optimizer, whose copy has them."""
        tensors = {name: each.detach() for name, each in self.value.named_parameters() if name not in self._left_out}
        if earlier is None or not _fit(earlier, tensors):
            return {name: tensor.clone() for name, tensor in tensors.items()}
        if tensors:
            torch._foreach_copy_(list(earlier.values()), list(tensors.values()))
        return earlier

    @override
    def put_heavy(self, heavy: dict[str, torch.Tensor]) -> None:
        own_memory(self.value.parameters())  # ranks that share it may still be in another step
        parameters = dict(self.value.named_parameters())
        if heavy:
            torch._foreach_copy_([parameters[name].detach() for name in heavy], list(heavy.values()))

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
        super().__init__(value)
        if isinstance(value, ShardedOptimizer):
            value.expect_commits()

    @override
    def set_value(self, value: torch.optim.Optimizer) -> None:
        super().set_value(value)
        if isinstance(value, ShardedOptimizer):
            value.expect_commits()

    @override
    def require_replaceable(self) -> None:
        if isinstance(self.value, ShardedOptimizer) and self.value.is_spread:
            raise _not_replaceable("optimizer")

    @override
    def secure(self) -> None:
        if isinstance(self.value, ShardedOptimizer):
            self.value.keep_parts()

    @property
    @override
    def is_complete(self) -> bool:
        return not (isinstance(self.value, ShardedOptimizer) and self.value.is_divided)

    @property
    @override
    def needs_copies(self) -> bool:
        """In a step of several ranks, each has updated its part before it hears of a loss."""
        has_others = basics.is_initialized() and basics.size() > 1
        return isinstance(self.value, ShardedOptimizer) and (self.value.is_divided or has_others)

    @override
    def partial(self, heavy: Any) -> Kept | None:
        return heavy.copy if isinstance(heavy, KeptState) and not heavy.copy.is_whole else None

    @override
    def rows(self) -> Mapping[RowId, Bytes]:
        return self.value.kept_rows() if isinstance(self.value, ShardedOptimizer) else {}

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
    def included(self) -> Sequence[object]:
        return (
            self.value.kept_state.included if isinstance(self.value, ShardedOptimizer) and self.value.is_spread else ()
        )

    @override
    def heavy(self, earlier: Any) -> Any:
        """The state of each parameter; of a sharded optimizer, the copy that :meth:`secure` has kept for all ranks."""
        if isinstance(self.value, ShardedOptimizer) and self.value.is_spread:
            return self.value.kept_state
        earlier = earlier if isinstance(earlier, dict) else {}
        return {key: _copied(state, earlier.get(key)) for key, state in self.value.state.items()}

    @override
    def put_heavy(self, heavy: Any) -> None:
        values = () if isinstance(heavy, dict) else heavy.read()  # before anything changes
        if isinstance(self.value, ShardedOptimizer):
            self.value.release()
        state = heavy if isinstance(heavy, dict) else heavy.restored(values)
        self.value.state.clear()
        self.value.state.update({key: mapped(each, _cloned) for key, each in state.items()})

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
        if isinstance(self.value, ShardedOptimizer):
            self.value.unshare_parameters()  # a rank that was left behind may still write there
        for group in parameter_groups(self.value):
            _drop_gradients(group)


def _not_replaceable(noun: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the {noun} of a state cannot be replaced while a sharded optimizer has its state in parts, because the last "
        "commit would lose its parameters; call optimizer.load_state_dict(optimizer.state_dict()) and state.commit() "
        "before, on all ranks"
    )


def _description(parameter: torch.Tensor) -> str:
    return f"{parameter.dtype} {tuple(parameter.shape)}".removeprefix("torch.")


def _fit(copies: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    return list(copies) == list(tensors) and all(map(_fits, copies.values(), tensors.values()))


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
