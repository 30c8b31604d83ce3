"""The parameters of a torch optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

__all__ = ["Names", "parameter_groups"]

Names: TypeAlias = dict[torch.Tensor, str]


def parameter_groups(optimizer: torch.optim.Optimizer) -> Sequence[Sequence[torch.Tensor]]:
    """The parameters of each group of ``optimizer``."""
    return [group["params"] for group in optimizer.param_groups]
