"""The element types of TensorFlow and of the engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from collectives import DType, InvalidRequestError

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

_BITS = {
    tf.uint16: tf.int16,
    tf.uint32: tf.int32,
    tf.uint64: tf.int64,
}


_PARTS = {
    tf.RaggedTensor: "its parts, flat_values and row_splits, or its to_tensor()",
    tf.SparseTensor: "its parts, indices and values, or tf.sparse.to_dense(tensor)",
}


def as_bits(value: Any) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
    """As :func:`as_tensor`, for operations that only move elements, and the function that gives results their type.

    So elements may have types with which the engine cannot compute, such as the uint32 of a seed of Keras.
    """
    tensor = _converted(value)
    if tensor.dtype not in _BITS:
        require_dtype(tensor, (*_NATIVE, *_BITS))
        return tensor, _identity
    native = tensor.dtype
    return tf.bitcast(tensor, _BITS[native]), lambda result: tf.bitcast(result, native)


def _identity(tensor: tf.Tensor) -> tf.Tensor:
    return tensor


def as_tensor(value: Any) -> tf.Tensor:
    """``value`` as a tensor; InvalidRequestError if it is no tensor and cannot become one, or has another type."""
    tensor = _converted(value)
    require_dtype(tensor)
    return tensor


def _converted(value: Any) -> tf.Tensor:
    for kind, parts in _PARTS.items():
        if isinstance(value, kind):
            raise InvalidRequestError(f"a {kind.__name__} is not one tensor; give {parts}")
    try:
        return tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            f"a value of type {type(value).__name__} cannot be converted to a tensor: {error}"
        ) from error


def require_dtype(tensor: tf.Tensor, allowed: Collection[tf.DType] = _NATIVE.keys()) -> None:
    """InvalidRequestError for a tensor whose type is not ``allowed``; by default, those that the engine knows."""
    if tensor.dtype not in allowed:
        raise InvalidRequestError(f"Tensor type {tensor.dtype.name} is not supported; {_remedy(tensor.dtype, allowed)}")


def _remedy(dtype: tf.DType, allowed: Collection[tf.DType]) -> str:
    if dtype is tf.string:
        return "give strings as objects of Python to allgather_object or broadcast_object"
    return f"convert the tensor, with tf.cast, to one of: {', '.join(each.name for each in allowed)}"


def is_continuous(tensor: tf.Tensor | None) -> bool:
    """Whether it has gradients: its elements are floating-point or complex numbers."""
    return tensor is not None and (tensor.dtype.is_floating or tensor.dtype.is_complex)
