"""What the kernels that pack compute, on the host: the reference for those of the GPU."""

from __future__ import annotations

import numpy as np

from collectives.api import DType, ReduceOp
from collectives.backends.host import Array
from collectives.backends.nccl.interface import DTypeConversion
from collectives.kernels.reduction import narrow, scale_array, widen

__all__ = ["carried", "returned"]

HALVES = (DType.FLOAT16, DType.BFLOAT16)


@np.errstate(all="ignore")
def carried(numbers: Array, conversion: DTypeConversion, factor: float) -> Array:
    """``factor`` times the ``numbers``, as the carrier."""
    dtype = conversion.dtype
    if conversion.key is not None:
        return _keys(_floats(numbers, dtype) * _factor(factor, dtype), conversion.key)
    if conversion.divisor != 1 and factor != 1.0:  # the sum of wide integers, so these do not wrap
        return np.multiply(numbers, factor, dtype=np.float64).astype(np.int64)
    scaled = np.empty_like(numbers)
    scale_array(numbers, scaled, dtype, factor)
    return scaled.view(conversion.carrier.storage) if conversion.is_copy else scaled.astype(conversion.carrier.storage)


@np.errstate(all="ignore")
def returned(numbers: Array, conversion: DTypeConversion, factor: float) -> Array:
    """``factor`` times the ``numbers`` of the carrier, as the type of the tensor."""
    dtype, divisor = conversion.dtype, conversion.divisor
    if conversion.key is not None:
        return _narrowed(_unkeyed(numbers) * _factor(factor, dtype), dtype)
    if divisor != 1 and factor != 1.0:
        return (np.multiply(numbers, factor, dtype=np.float64) / divisor).astype(np.int64).astype(dtype.storage)
    if divisor != 1:
        return (np.sign(numbers) * (np.abs(numbers) // divisor)).astype(dtype.storage)
    result = numbers.view(dtype.storage) if conversion.is_copy else numbers.astype(dtype.storage)
    scaled = np.empty_like(result)
    scale_array(result, scaled, dtype, factor)
    return scaled


def _factor(factor: float, dtype: DType) -> Array:
    return np.float64(factor) if dtype is DType.FLOAT64 else np.float32(factor)


def _floats(numbers: Array, dtype: DType) -> Array:
    return widen(numbers, dtype) if dtype in HALVES else numbers


def _narrowed(numbers: Array, dtype: DType) -> Array:
    if dtype not in HALVES:
        return numbers
    result = np.empty(numbers.size, dtype.storage)
    narrow(numbers, result, dtype)
    return result


def _keys(floats: Array, key: ReduceOp) -> Array:
    bits = floats.view(f"int{8 * floats.itemsize}")
    limits = np.iinfo(bits.dtype)
    keys = np.where(bits < 0, bits ^ limits.max, bits)
    return np.where(np.isnan(floats), limits.max if key is ReduceOp.MAX else limits.min, keys)


def _unkeyed(keys: Array) -> Array:
    bits = np.where(keys < 0, keys ^ np.iinfo(keys.dtype).max, keys)
    return bits.view(f"float{8 * keys.itemsize}")
