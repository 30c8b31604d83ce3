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

__all__ = ["Hold", "buffer_of", "shape_of"]

_TYPES = {dtype: np.dtype(dtype.storage).str for dtype in DType}
_EMPTY = {dtype: np.empty(0, dtype.storage) for dtype in DType}


class Hold:
    """Keeps a TF_Tensor, and so its memory, for as long as an array views it, or a buffer owns it."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, tensor: int, interface: dict[str, Any] | None = None) -> None:
        self.tensor = tensor
        if interface is not None:
            self.__array_interface__ = interface

    def __del__(self, delete: Callable[[int], None] = calls.TF_DeleteTensor) -> None:
        delete(self.tensor)


def shape_of(tensor: int) -> tuple[int, ...]:
    """The dimensions of a TF_Tensor."""
    dim = calls.TF_Dim
    return tuple([dim(tensor, axis) for axis in range(calls.TF_NumDims(tensor))])


def buffer_of(tensor: int, shape: tuple[int, ...] | None = None) -> Buffer:
    """The memory of a TF_Tensor in host memory. The tensor belongs to a :class:`Hold`, the owner of the buffer."""
    dtype = DTYPES[calls.TF_TensorType(tensor)]
    if shape is None:
        shape = shape_of(tensor)
    count = prod(shape)
    if not count:
        return Buffer(_EMPTY[dtype], dtype, shape, Hold(tensor))
    interface = {
        "data": (calls.TF_TensorData(tensor), False),
        "shape": (count,),
        "typestr": _TYPES[dtype],
        "version": 3,
    }
    hold = Hold(tensor, interface)
    return Buffer(np.asarray(hold), dtype, shape, hold)
