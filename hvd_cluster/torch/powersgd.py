"""PowerSGD: gradients of low rank."""

from __future__ import annotations

import torch

from collectives import InvalidRequestError, override
from hvd_cluster.gradients.compression import GradientCompressor, Rounds


class PowerSGD(GradientCompressor):
    """Sends an n x m gradient as two thin matrices, of n x ``rank`` and m x ``rank`` elements.

    Each training step does one step of subspace iteration, which starts from the result of the last one. The error of a
    step is added to the next gradient. A tensor of more dimensions is a matrix of shape[0] rows. A tensor that would
    not become smaller, such as a vector, travels uncompressed.

    It computes in float32, or in float64 for parameters of float64. The error, the part of the gradients that was not
    sent, needs the memory of one more gradient. If a combined factor is not finite, for example under a GradScaler that
    tries a scale, the result is NaN and the error is dropped, because it has the old scale. ``state_dict()`` does not
    contain the error, and ``load_state_dict()`` drops it.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, algorithms 1 and 2 (https://arxiv.org/abs/1905.13727); here the kept factor is made
    orthogonal, too, so that a direction that was zero once can come back.
    """

    repeatable = True

    def __init__(self, parameter: torch.Tensor, rank: int = 4) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise InvalidRequestError(f"PowerSGD(rank={rank!r}) must be an integer of at least 1")
        rows = parameter.shape[0] if parameter.dim() > 1 else 1
        columns = parameter.numel() // max(rows, 1)
        self._factor: torch.Tensor | None = None
        if (rows + columns) * rank < parameter.numel():
            self._factor = _first_factor(columns, rank, parameter)
            self._error = torch.zeros(rows, columns, dtype=self._factor.dtype, device=parameter.device)

    @override
    def rounds(self, gradient: torch.Tensor) -> Rounds:
        if self._factor is None:
            return (yield gradient)
        matrix = gradient.reshape(self._error.shape) + self._error
        left = yield matrix @ _orthogonal(self._factor)
        if not left.isfinite().all():
            return self._overflown(gradient)
        left = _orthogonal(left)
        right = matrix.t() @ left
        error = matrix - left @ right.t()
        right = yield right
        if not right.isfinite().all():
            return self._overflown(gradient)
        self._factor, self._error = right, error
        return (left @ right.t()).to(gradient.dtype)

    def _overflown(self, gradient: torch.Tensor) -> torch.Tensor:
        self._error.zero_()
        return torch.full_like(gradient, torch.nan)


def _first_factor(columns: int, rank: int, parameter: torch.Tensor) -> torch.Tensor:
    """Random, and the same on all ranks."""
    dtype = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(1)
    return torch.randn(columns, rank, dtype=dtype, generator=generator, device="cpu").to(parameter.device)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    columns: torch.Tensor = torch.linalg.qr(matrix).Q
    return columns
