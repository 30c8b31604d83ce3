"""The parameters of a torch optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

__all__ = ["Names", "groups_of", "parameter_groups"]

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
