"""The compressors that come with the torch binding."""

from __future__ import annotations

from typing import Any

import torch

from collectives import override
from hvd_cluster.core import memory
from hvd_cluster.gradients.compression import CastCompressor, Compressor, IntoCompressor, NoneCompressor
from hvd_cluster.torch.powersgd import PowerSGD
from hvd_cluster.torch.tensors import fresh

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor, IntoCompressor):
    @staticmethod
    @override
    def float_type(tensor: torch.Tensor) -> torch.dtype | None:
        return tensor.dtype if tensor.is_floating_point() else None

    @staticmethod
    @override
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``tensor`` as ``dtype``, in memory that is used again if it is large.

        To allocate and free it in each step would let the C library return memory to the kernel, also that of
        gradients, and page faults would cost more time than the conversion.
        """
        if not tensor.is_cpu or tensor.requires_grad or tensor.dtype is dtype or not tensor.is_contiguous():
            return tensor.to(dtype)
        if tensor.numel() * dtype.itemsize < memory.MINIMUM:
            return tensor.to(dtype)
        small: torch.Tensor = fresh(tuple(tensor.shape), dtype).owner.copy_(tensor)
        return small

    @classmethod
    @override
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)

    @staticmethod
    @override
    def decompress_into(tensor: torch.Tensor, ctx: Any, target: torch.Tensor) -> None:
        if tensor is not target:
            target.copy_(tensor)


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
