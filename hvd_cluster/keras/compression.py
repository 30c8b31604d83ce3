"""The compressors that come with the Keras binding, on every backend."""

from __future__ import annotations

from typing import Any

import keras

from collectives import override
from hvd_cluster.gradients.compression import CastCompressor, Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast(CastCompressor):
    cast = staticmethod(keras.ops.cast)

    @staticmethod
    @override
    def float_type(tensor: Any) -> str | None:
        dtype: str = keras.backend.standardize_dtype(tensor.dtype)
        return dtype if "float" in dtype else None


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16: 11 bits of precision, numbers up to 65504."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: 8 bits of precision, the range of float32."""

    dtype = "bfloat16"


class Compression:
    """The compressors that come with the package."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
