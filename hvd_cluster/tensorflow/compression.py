"""The compressors that come with the TensorFlow binding."""

from __future__ import annotations

import tensorflow as tf

from collectives import override
from hvd_cluster.gradients.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor):
    cast = staticmethod(tf.cast)

    @staticmethod
    @override
    def float_type(tensor: tf.Tensor) -> tf.DType | None:
        return tensor.dtype if tensor.dtype.is_floating else None


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
