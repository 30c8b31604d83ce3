"""What gradients are turned into while they travel."""

from __future__ import annotations

from typing import Any

import torch

from collectives.api import InvalidRequestError

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor", "require_compressor"]


class Compressor:
    """Turns a tensor into what travels, and back. Subclasses are used as classes, never instantiated."""

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

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See :class:`Compressor`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See :class:`Compressor`."""
        return tensor


class FP16Compressor(Compressor):
    """Sends floating-point tensors in 16 bits; others as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """See :class:`Compressor`."""
        return (tensor.half(), tensor.dtype) if tensor.is_floating_point() else (tensor, None)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """See :class:`Compressor`."""
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor


def require_compressor(compression: Any) -> None:
    """InvalidRequestError for what cannot compress; any object with compress and decompress can."""
    if not (callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))):
        raise InvalidRequestError(
            f"compression={compression!r} has no compress and decompress; use Compression.none, Compression.fp16 or a "
            "subclass of Compressor"
        )
