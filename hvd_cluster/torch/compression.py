"""What gradients are turned into while they travel."""

from __future__ import annotations

from typing import Any

import torch

from collectives.api import InvalidRequestError
from hvd_cluster.torch.powersgd import PowerSGD

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor", "require_compressor"]


class Compressor:
    """Turns a tensor into what travels, and back. Subclasses are used as classes, never instantiated."""

    elementwise = False
    """Whether each element is treated alone: then several gradients may be given as one tensor."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what :meth:`decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor as it was before :meth:`compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    elementwise = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See :class:`Compressor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See :class:`Compressor`."""
        return tensor


class _Cast(Compressor):
    """Sends floating-point tensors in 16 bits; others as they are."""

    elementwise = True
    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See :class:`Compressor`."""
        return (tensor.to(cls.dtype), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See :class:`Compressor`."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16: 11 bits of precision, numbers up to 65504."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors that come with the package.

    ``powersgd`` is for DistributedOptimizer only, ``functools.partial(Compression.powersgd, rank=2)`` for other ranks.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    powersgd = PowerSGD


def require_compressor(compression: Any) -> None:
    """InvalidRequestError for what cannot compress; any object with compress and decompress can."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise InvalidRequestError(
            f"compression={compression!r} has no compress and decompress; use Compression.none, fp16 or bf16, or a "
            "subclass of Compressor"
        )
