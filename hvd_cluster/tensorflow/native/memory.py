"""Tensors of the C API as buffers: the memory itself, never a copy."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from collectives.api import DType
from collectives.buffers import Buffer
from hvd_cluster.tensorflow.native.library import calls
from hvd_cluster.tensorflow.tensors import DTYPES

__all__ = ["buffer_of", "shape_of"]

_TYPES = {dtype: np.dtype(dtype.storage).str for dtype in DType}
_EMPTY = {dtype: np.empty(0, dtype.storage) for dtype in DType}


class _Hold:
    """Keeps a TF_Tensor, and so its memory, for as long as an array views it."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: int, interface: dict[str, Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = interface

    def __del__(self, delete: Callable[[int], None] = calls.TF_DeleteTensor) -> None:
        delete(self._tensor)


def shape_of(tensor: int) -> tuple[int, ...]:
    """The dimensions of a TF_Tensor."""
    dim = calls.TF_Dim
    return tuple([dim(tensor, axis) for axis in range(calls.TF_NumDims(tensor))])


def buffer_of(tensor: int, shape: tuple[int, ...] | None = None) -> Buffer:
    """The memory of a TF_Tensor in host memory, which belongs to the buffer from now on."""
    dtype = DTYPES[calls.TF_TensorType(tensor)]
    if shape is None:
        shape = shape_of(tensor)
    count = prod(shape)
    if not count:
        calls.TF_DeleteTensor(tensor)
        return Buffer(_EMPTY[dtype], dtype, shape)
    interface = {
        "data": (calls.TF_TensorData(tensor), False),
        "shape": (count,),
        "typestr": _TYPES[dtype],
        "version": 3,
    }
    return Buffer(np.asarray(_Hold(tensor, interface)), dtype, shape)
