"""Tensors as rows of elements in the order of memory, and the portions of a row that each rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from collectives import Work
from hvd_cluster.ops.submission import Operand
from hvd_cluster.torch.tensors import to_buffer


def dense_strides(parameter: torch.Tensor) -> tuple[int, ...]:
    """Those of ``parameter``, or contiguous ones if it has gaps."""
    return torch.empty_like(parameter, device="meta").stride()


def in_row(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """The elements of ``tensor``, in the order of memory with ``strides``; copied only if it has other ones."""
    tensor = tensor.detach()
    if tensor.stride() != tuple(strides):
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


class Portions(NamedTuple):
    """The numbers of elements that each rank gets of a gradient, in the order of memory with ``strides``.

    ``position`` is that of this rank in ``counts``.
    """

    counts: tuple[int, ...]
    position: int
    strides: tuple[int, ...]

    def fit(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a gradient, not a tensor that stands for one."""
        return (
            tensor.layout is torch.strided and tensor.dim() == len(self.strides) and tensor.numel() == sum(self.counts)
        )

    def operand(self, tensor: torch.Tensor) -> Operand:
        """For a reduce-scatter of the gradient ``tensor``: this rank's portion of it is overwritten by the result."""
        row = in_row(tensor, self.strides)
        start = sum(self.counts[: self.position])
        own = row[start : start + self.counts[self.position]]

        def finish(work: Work) -> torch.Tensor:
            if tensor.stride() == self.strides:
                increment_version(tensor)
            else:
                tensor.copy_(row.as_strided(tensor.shape, self.strides))
            return tensor

        return Operand(to_buffer(row), to_buffer(own), finish)
