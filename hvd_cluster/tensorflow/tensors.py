"""The element types of TensorFlow and of the engine."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from collectives.api import DType, InvalidRequestError

__all__ = ["ALLOWED", "DTYPES", "as_tensor", "is_continuous", "require_dtype"]

_NATIVE = {
    tf.uint8: DType.UINT8,
    tf.int8: DType.INT8,
    tf.int16: DType.INT16,
    tf.int32: DType.INT32,
    tf.int64: DType.INT64,
    tf.float16: DType.FLOAT16,
    tf.bfloat16: DType.BFLOAT16,
    tf.float32: DType.FLOAT32,
    tf.float64: DType.FLOAT64,
    tf.bool: DType.BOOL,
    tf.complex64: DType.COMPLEX64,
    tf.complex128: DType.COMPLEX128,
}
DTYPES: dict[int, DType] = {native.as_datatype_enum: dtype for native, dtype in _NATIVE.items()}
"""By the number that TensorFlow gives to a type."""
ALLOWED = ", ".join(native.name if native is not tf.float16 else "half" for native in _NATIVE)
"""The types in the language of definitions of ops."""


def as_tensor(value: Any) -> tf.Tensor:
    """``value`` as a tensor; InvalidRequestError if it is no tensor and cannot become one, or has another type."""
    try:
        tensor = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"a {type(value).__name__} cannot be converted to a tensor: {error}") from error
    require_dtype(tensor)
    return tensor


def require_dtype(tensor: tf.Tensor) -> None:
    """InvalidRequestError for a tensor whose type the engine does not know."""
    if tensor.dtype not in _NATIVE:
        allowed = ", ".join(native.name for native in _NATIVE)
        raise InvalidRequestError(
            f"Tensor type {tensor.dtype.name} is not supported; convert the tensor, with tf.cast, to one of: {allowed}"
        )


def is_continuous(tensor: tf.Tensor | None) -> bool:
    """Whether it has gradients: its elements are floating-point or complex numbers."""
    return tensor is not None and (tensor.dtype.is_floating or tensor.dtype.is_complex)
