"""Tensors as rows of elements in the order of memory, and the parts of a row that belong to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from collectives import InvalidRequestError, Work
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


class ParameterPart(NamedTuple):
    """The elements ``start`` to ``stop`` of ``parameter``, which are ``tensor``: the parameter itself, or a row.

    ``strides`` are those of the parameter.
    """

    parameter: torch.Tensor
    start: int
    stop: int
    tensor: torch.Tensor
    strides: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.stop - self.start == self.parameter.numel()

    def take_gradient(self, sparse_as_dense: bool) -> None:
        """Let ``tensor.grad`` be this part of the gradient. InvalidRequestError for a sparse one that must be cut."""
        if self.is_whole:
            return
        gradient = self.parameter.grad
        if sparse_as_dense and gradient is not None:
            gradient = gradient.to_dense()
        if gradient is not None and gradient.layout is not torch.strided:
            raise InvalidRequestError(
                f"a gradient of shape {tuple(gradient.shape)} is sparse, and cannot be cut; give DistributedOptimizer "
                "sparse_as_dense=True, or leave out sharded"
            )
        self.tensor.grad = None if gradient is None else self.part_of(gradient)

    def drop_gradient(self) -> None:
        """The part of the gradient is not needed any more."""
        if not self.is_whole:
            self.tensor.grad = None

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a ``tensor`` with the shape of the parameter; a view if it has its strides."""
        return tensor.detach() if self.is_whole else in_row(tensor, self.strides)[self.start : self.stop]
