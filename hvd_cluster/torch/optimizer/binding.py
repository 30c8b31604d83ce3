"""The parameters of a torch optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from collectives.api import Operation, ReduceOp, override
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.binding import Binding, DifferenceBinding, Tensors
from hvd_cluster.gradients.buckets import Size
from hvd_cluster.ops.handles import Handle, HandleGroup
from hvd_cluster.torch.operations.operands import in_place, start, start_group, synchronize
from hvd_cluster.torch.operations.sparse import sparse_allreduce_async
from hvd_cluster.torch.optimizer.holding import CAN_HOLD, Spares, address, hold, is_held, is_shared, is_unchanged

Names: TypeAlias = dict[torch.Tensor, str]


def parameter_groups(optimizer: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
    """The parameters of each group of ``optimizer``."""
    return [group["params"] for group in optimizer.param_groups]


def groups_of(optimizer: torch.optim.Optimizer) -> Callable[[], Sequence[Sequence[torch.Tensor]]]:
    """A function that gives the parameters of each group of ``optimizer``, without keeping it in use."""
    reference = weakref.ref(optimizer)

    def groups() -> Sequence[Sequence[torch.Tensor]]:
        optimizer = reference()
        return [] if optimizer is None else parameter_groups(optimizer)

    return groups


class TorchPack:
    """One row of memory for gradients of ``shapes``, of one type.

    ``tensor`` is the row, and ``pieces`` are views of it in the shapes of the gradients.
    """

    __slots__ = ("pieces", "shapes", "tensor")

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        first, count = gradients[0], sum([gradient.numel() for gradient in gradients])
        self.shapes = [gradient.shape for gradient in gradients]
        self.tensor = torch.empty(count, dtype=first.dtype, device=first.device)
        self.pieces = views(self.tensor, gradients)

    def fill(self, gradients: Sequence[torch.Tensor]) -> None:
        """Copy ``gradients`` into the row."""
        torch._foreach_copy_(self.pieces, list(gradients))

    def spread(self, combined: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Copy ``combined``, which may be the row itself, into ``gradients``."""
        pieces = self.pieces if combined is self.tensor else views(combined, gradients)
        torch._foreach_copy_(list(gradients), pieces)


def views(row: torch.Tensor, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Consecutive pieces of ``row`` in the shapes of ``gradients``."""
    pieces = torch.split(row, [gradient.numel() for gradient in gradients])
    return [piece.view(gradient.shape) for piece, gradient in zip(pieces, gradients, strict=True)]


class TorchTensors(Tensors[torch.Tensor]):
    """The operations that both kinds of distributed optimizers need."""

    @staticmethod
    @override
    def gradient(parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    @staticmethod
    @override
    def is_trained(parameter: torch.Tensor) -> bool:
        return parameter.requires_grad

    @staticmethod
    @override
    def wait(handle: Handle | HandleGroup) -> Any:
        return synchronize(handle)

    @staticmethod
    @override
    def unrecorded() -> torch.no_grad:
        return torch.no_grad()


class TorchDifferences(TorchTensors, DifferenceBinding[torch.Tensor]):
    """For optimizers with op=Adasum."""

    @staticmethod
    @override
    def start_group(
        tensors: Sequence[torch.Tensor], name: str, process_set: ProcessSet, fields: Mapping[str, Any]
    ) -> HandleGroup:
        return start_group(Operation.ALLREDUCE, in_place, tensors, tuple, name, process_set, **fields)

    @staticmethod
    @override
    def snapshot(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.detach().clone()

    @staticmethod
    @override
    def difference(parameter: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return parameter - start

    @staticmethod
    @override
    def move(parameter: torch.Tensor, start: torch.Tensor, change: torch.Tensor) -> None:
        parameter.copy_(start.add_(change))

    @staticmethod
    @override
    def restore(parameter: torch.Tensor, start: torch.Tensor) -> None:
        parameter.copy_(start)

    @staticmethod
    @override
    def is_finite(gradient: torch.Tensor) -> bool:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.isfinite().all())

    @staticmethod
    @override
    def spoil(gradient: torch.Tensor) -> None:
        with torch.no_grad():
            gradient.mul_(torch.inf)


class TorchBinding(TorchTensors, Binding[torch.Tensor]):
    """``on_gradient`` is the method of a distributed optimizer; hooks end when its object is not in use any more."""

    change_remedy = (
        "to clip or to unscale gradients, call optimizer.synchronize(), change them, and call step(), or "
        "scaler.step(), inside optimizer.skip_synchronize()"
    )
    send_remedy = (
        "call step() or synchronize() first, on all ranks, also after a backward that failed. If a backward reaches "
        "parameters that it does not train, as that of a generator reaches its discriminator, call "
        "requires_grad_(False) on them before the forward, and requires_grad_(True) after it"
    )
    can_hold = CAN_HOLD
    repeat_remedy = (
        "with activation checkpointing, give it use_reentrant=False: the older kind computes gradients once for each "
        "call of a layer"
    )

    def __init__(self, on_gradient: Callable[[torch.Tensor], None]) -> None:
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._spares = Spares()

    @staticmethod
    @override
    def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.grad = gradient

    @staticmethod
    @override
    def set_zeros(parameter: torch.Tensor) -> None:
        parameter.grad = torch.zeros_like(parameter)

    @staticmethod
    @override
    def state(parameter: torch.Tensor) -> tuple[object, int]:
        gradient = parameter.grad
        return (None, 0) if gradient is None else (weakref.ref(gradient), gradient._version)

    @staticmethod
    @override
    def size(tensor: torch.Tensor) -> Size:
        return Size(tensor.numel() * tensor.element_size(), (tensor.dtype, tensor.device))

    @staticmethod
    @override
    def count(parameter: torch.Tensor) -> int:
        return parameter.numel()

    @staticmethod
    @override
    def sparse_dimensions(gradient: torch.Tensor) -> int | None:
        return gradient.sparse_dim() if gradient.is_sparse else None

    @staticmethod
    @override
    def to_sparse(gradient: torch.Tensor, dimensions: int) -> torch.Tensor:
        return gradient.to_sparse(dimensions)

    @staticmethod
    @override
    def to_dense(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_dense()

    @staticmethod
    @override
    def pack(gradients: Sequence[torch.Tensor], earlier: Any) -> TorchPack:
        shapes = [gradient.shape for gradient in gradients]
        pack = earlier if earlier is not None and earlier.shapes == shapes else TorchPack(gradients)
        pack.fill(gradients)
        return pack

    @staticmethod
    @override
    def outgoing(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clone() if is_shared(gradient) else gradient

    @staticmethod
    @override
    def hold(gradient: torch.Tensor) -> torch.Tensor:
        return hold(gradient._values() if gradient.is_sparse else gradient)

    @staticmethod
    @override
    def is_unchanged(gradient: torch.Tensor, held: torch.Tensor) -> bool:
        return is_unchanged(gradient._values() if gradient.is_sparse else gradient, held)

    def incoming(self, gradient: torch.Tensor, combined: torch.Tensor) -> None:
        """The gradient, which the user may hold, takes the memory of ``combined`` where that fits."""
        if address(combined) == address(gradient):
            return
        is_plain = gradient.is_contiguous() and combined.is_contiguous() and combined.dtype is gradient.dtype
        if is_plain and not is_shared(gradient):
            if is_held(gradient):
                self._spares.give(gradient)
            gradient.data = combined.view(gradient.shape)
        else:
            gradient.copy_(combined.reshape(gradient.shape))

    @staticmethod
    @override
    def placeholder(parameter: torch.Tensor) -> torch.Tensor:
        return parameter.new_empty((0,) * (parameter.dim() + 1))

    @staticmethod
    @override
    def marker() -> torch.Tensor:
        return torch.zeros((), dtype=torch.uint8)

    @override
    def start(self, tensor: torch.Tensor, name: str, process_set: ProcessSet, fields: Mapping[str, Any]) -> Handle:
        return start(Operation.ALLREDUCE, self._spares.operand, tensor, name, process_set, **fields)

    @override
    def start_group(
        self, tensors: Sequence[torch.Tensor], name: str, process_set: ProcessSet, fields: Mapping[str, Any]
    ) -> HandleGroup:
        return start_group(Operation.ALLREDUCE, self._spares.operand, tensors, tuple, name, process_set, **fields)

    @staticmethod
    @override
    def start_sparse(
        gradient: torch.Tensor, name: str, factor: float, op: ReduceOp, process_set: ProcessSet
    ) -> Callable[[], torch.Tensor]:
        is_scaled = factor != 1.0
        finish = sparse_allreduce_async(gradient / factor if is_scaled else gradient, name, op, process_set)

        def combined() -> torch.Tensor:
            return (finish() * factor if is_scaled else finish()).coalesce()

        return combined

    @override
    def watch(self, parameter: torch.Tensor) -> Callable[[], None]:
        method = self._on_gradient

        def hook(parameter: torch.Tensor) -> None:
            on_gradient = method()
            if on_gradient is None:
                handle.remove()
            else:
                on_gradient(parameter)

        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        return handle.remove
