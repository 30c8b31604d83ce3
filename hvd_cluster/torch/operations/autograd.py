"""What the gradients of all operations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.torch.operations.compilation import uncompiled

__all__ = ["apply", "backward_of_group", "is_recorded", "name_of_backward"]


@uncompiled
def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """What ``forward`` returns, with ``backward`` behind it."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def backward_of_group(
    gradients: Sequence[torch.Tensor], backward: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> tuple[torch.Tensor | None, ...]:
    """What ``backward`` makes of the gradients; None for those of integers and bools, on all ranks alike."""
    continuous = [gradient.is_floating_point() or gradient.is_complex() for gradient in gradients]
    results = iter(backward([gradient for gradient, has_one in zip(gradients, continuous, strict=True) if has_one]))
    return tuple(next(results) if has_one else None for has_one in continuous)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether autograd follows what happens to ``tensor`` now."""
    return tensor.requires_grad and torch.is_grad_enabled()


def name_of_backward(name: str | None) -> str | None:
    """What the gradients of an operation of ``name`` travel under."""
    return None if name is None else f"{name}.backward"
