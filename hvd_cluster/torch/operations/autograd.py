"""Torch's side of the gradients of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_cluster.operations.gradients import of_group
from hvd_cluster.torch.operations.compilation import uncompiled

__all__ = ["apply", "backward_of_group", "is_recorded"]


@uncompiled
def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """The result of ``forward``; autograd calls ``backward`` for its gradients."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]


def backward_of_group(
    gradients: Sequence[torch.Tensor], backward: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
) -> tuple[torch.Tensor | None, ...]:
    """See :func:`hvd_cluster.operations.gradients.of_group`."""
    return of_group(gradients, lambda gradient: gradient.is_floating_point() or gradient.is_complex(), backward)


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether autograd records operations on ``tensor`` now."""
    return tensor.requires_grad and torch.is_grad_enabled()
