"""Any array -> :class:`Buffer`: memory, dtype, shape, device. Never copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from collectives.api import DType, InvalidRequestError
from collectives.backends.completion import Completion

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Buffer:
    """Contiguous typed memory.

    ``array`` is a one-dimensional view in ``dtype.storage`` layout, None for device memory; ``pointer`` is the address.
    ``owner`` is the user's object, such as a tensor; it keeps the memory alive. ``ready``, for device memory only, is
    the end of the work that still uses the memory, such as a kernel that computes a gradient: the backend waits for it.
    """

    array: Array | None
    dtype: DType
    shape: tuple[int, ...]
    owner: Any = None
    device: str = "cpu"
    address: int = 0
    ready: Completion | None = None

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * self.dtype.itemsize

    def part(self, start: int, stop: int) -> Buffer:
        """Elements [start, stop) of the memory, flat."""
        array = None if self.array is None else self.array[start:stop]
        address = self.address and self.address + start * self.dtype.itemsize
        return Buffer(array, self.dtype, (stop - start,), self.owner, self.device, address, self.ready)

    def cast(self, dtype: DType) -> Buffer:
        """The same bytes as elements of ``dtype``, flat."""
        array = None if self.array is None else self.array.view(dtype.storage)
        count = self.nbytes // dtype.itemsize
        return Buffer(array, dtype, (count,), self.owner, self.device, self.address, self.ready)

    @property
    def pointer(self) -> int:
        """The address of the first element."""
        return self.address if self.array is None else int(self.array.__array_interface__["data"][0])

    @property
    def host(self) -> Array:
        """The memory as a flat array; InvalidRequestError for device memory."""
        if self.array is None:
            raise self._not_on_host()
        return self.array

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory as a flat array of bytes; InvalidRequestError for device memory."""
        if self.array is None:
            raise self._not_on_host()
        return self.array.view(np.uint8)

    def _not_on_host(self) -> InvalidRequestError:
        return InvalidRequestError(f"the tensor is on {self.device}; this backend works on host memory")


def host_arrays(buffers: Sequence[Buffer]) -> list[Array]:
    """:attr:`Buffer.host` of each, without a call for each."""
    return [buffer.host if buffer.array is None else buffer.array for buffer in buffers]


def host_bytes(buffers: Sequence[Buffer]) -> list[npt.NDArray[np.uint8]]:
    """:attr:`Buffer.bytes` of each, without a call for each."""
    return [buffer.bytes if buffer.array is None else buffer.array.view(np.uint8) for buffer in buffers]


def as_bytes(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The same memory, as elements of one byte each."""
    return [buffer.cast(DType.UINT8) for buffer in buffers]


def empty(dtype: DType, shape: Sequence[int]) -> Buffer:
    """A new host buffer; its owner is the array in ``shape``."""
    array = np.empty(tuple(shape), dtype.storage)
    return Buffer(array.reshape(-1), dtype, tuple(shape), array)


def as_buffer(value: Any) -> Buffer:
    """View ``value`` as a buffer: NumPy arrays, ``__cuda_array_interface__``, ``__dlpack__``, the buffer protocol.

    InvalidRequestError for memory that is not C-contiguous, for object arrays and for unsupported dtypes.
    """
    if hasattr(value, "__cuda_array_interface__"):
        return _from_cuda(value)
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        return _from_array(np.asarray(value), value)
    if hasattr(value, "__dlpack__"):
        return _from_array(_from_dlpack(value), value)
    try:
        return _from_array(np.asarray(memoryview(value)), value)
    except TypeError:
        raise InvalidRequestError(
            f"a {type(value).__name__} is not an array; give a NumPy array or an object with __dlpack__, "
            "__array_interface__, __cuda_array_interface__ or the buffer protocol"
        ) from None


def _from_dlpack(value: Any) -> Array:
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError) as error:
        raise InvalidRequestError(f"a {type(value).__name__} cannot be viewed as an array: {error}") from error


def _from_array(array: Array, owner: Any) -> Buffer:
    dtype = _dtype(array.dtype)
    _require_contiguous(array.flags.c_contiguous, array.shape)
    return Buffer(array.view(dtype.storage).reshape(-1), dtype, array.shape, owner)


def _from_cuda(value: Any) -> Buffer:
    interface = value.__cuda_array_interface__
    dtype = _dtype(np.dtype(interface["typestr"]))
    shape = tuple(interface["shape"])
    strides = [prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(len(shape))]
    _require_contiguous(list(interface.get("strides") or strides) == strides, shape)
    return Buffer(None, dtype, shape, value, "cuda", interface["data"][0])


def _dtype(dtype: np.dtype[Any]) -> DType:
    return DType.from_label(dtype.name if dtype.isnative else dtype.str)


def _require_contiguous(contiguous: bool, shape: Sequence[int]) -> None:
    if not contiguous:
        raise InvalidRequestError(f"the array of shape {tuple(shape)} is not C-contiguous; copy it first")
