"""The compressors that come with the TensorFlow binding."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import override
from hvd_cluster.gradients.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(Compressor):
    """Sends floating-point tensors in 16 bits; others as they are."""

    elementwise = True
    dtype: tf.DType

    @classmethod
    @override
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (tf.cast(tensor, cls.dtype), tensor.dtype) if tensor.dtype.is_floating else (tensor, None)

    @staticmethod
    @override
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16: 11 bits of precision, numbers up to 65504."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    dtype = tf.bfloat16


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
