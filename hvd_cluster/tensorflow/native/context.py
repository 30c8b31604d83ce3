"""One run of a kernel: its inputs and outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_int64, c_void_p, sizeof
from math import prod
from typing import Any

import numpy as np

from collectives import Buffer, DType, empty
from hvd_cluster.tensorflow.native.library import AllocatorAttributes, calls, checked, status_of
from hvd_cluster.tensorflow.tensors import DTYPES

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


FORWARDED_BYTES = 1 << 16
"""The smallest tensor that is worth the question whether its memory may become that of the result."""

_HOST_MEMORY = AllocatorAttributes(sizeof(AllocatorAttributes), 1)

# Shared by all runs, held for an allocation.
_ending = threading.Lock()


class Context:
    """A run, from the call of the kernel to its end. Every method raises EngineError where TensorFlow refuses."""

    __slots__ = ("_has_ended", "_pointer")

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        self._has_ended = False

    @property
    def step(self) -> int:
        """The number of the run of the graph that this is a part of."""
        step: int = calls.TF_StepId(self._pointer)
        return step

    @property
    def iteration(self) -> int:
        """The number of the iteration of the innermost loop; 0 outside of loops."""
        number: int = calls.TF_GetIterId(self._pointer)
        return number

    @property
    def frame(self) -> int:
        """The number of the innermost loop in this run of the graph; 0 outside of loops.

        A loop in another one has a number for each iteration of that. Ranks that run the same graph have the same.
        """
        number: int = calls.TF_GetFrameId(self._pointer)
        return number

    @property
    def inputs(self) -> int:
        """The number of input tensors."""
        count: int = calls.TF_NumInputs(self._pointer)
        return count

    def input(self, index: int) -> Buffer:
        """The memory of an input, which must not be written."""
        return buffer_of(self._input(index))

    def _input(self, index: int) -> int:
        tensor = c_void_p()
        with checked() as status:
            calls.TF_GetInput(self._pointer, index, byref(tensor), status)
        return tensor.value or 0

    def output(self, index: int, shape: tuple[int, ...]) -> Buffer:
        """New memory for an output."""
        rank = len(shape)
        dimensions = (c_int64 * rank)(*shape)
        native = calls.TF_ExpectedOutputDataType(self._pointer, index)
        nbytes = prod(shape) * DTYPES[native].itemsize
        with checked() as status:
            tensor = calls.TF_AllocateOutput(self._pointer, index, native, dimensions, rank, nbytes, status)
        return buffer_of(tensor, shape)

    def candidate(self, index: int, dtype: DType, shape: tuple[int, ...]) -> Buffer:
        """New memory, which :meth:`give` makes an output if its shape turns out to be right.

        TensorFlow allocates an output once, but any number of these. On any thread, even after :meth:`end`: then it is
        memory for nobody.
        """
        with _ending:
            return empty(dtype, shape) if self._has_ended else self._new(index, shape)

    def _new(self, index: int, shape: tuple[int, ...]) -> Buffer:
        rank = len(shape)
        dimensions = (c_int64 * rank)(*shape)
        native = calls.TF_ExpectedOutputDataType(self._pointer, index)
        with checked() as status:
            tensor = calls.TF_AllocateTemp(self._pointer, native, dimensions, rank, byref(_HOST_MEMORY), status)
        return buffer_of(tensor, shape)

    def give(self, index: int, candidate: Buffer) -> None:
        """Let an output have the memory of a :meth:`candidate`."""
        hold = candidate.owner
        assert isinstance(hold, Hold)
        with checked() as status:
            calls.TF_SetOutput(self._pointer, index, hold.tensor, status)

    def end(self) -> None:
        """TensorFlow will not be asked for outputs any more, though the operation of the run may go on."""
        with _ending:
            self._has_ended = True

    def same(self, index: int) -> tuple[Buffer, Buffer]:
        """The memory of an input, and that of the output of the same number and shape.

        Both are the same memory where nobody else reads this input and it is large.
        """
        source = self.input(index)
        shape = source.shape
        if source.nbytes < FORWARDED_BYTES:
            return source, self.output(index, shape)
        del source  # TensorFlow gives the memory away only if there is no other owner
        tensor, forwarded = self._forward(index, shape)
        result = buffer_of(tensor, shape)
        return (result if forwarded else self.input(index)), result

    def _forward(self, index: int, shape: tuple[int, ...]) -> tuple[int, bool]:
        rank, candidate, forwarded = len(shape), c_int(index), c_int(-1)
        dimensions = (c_int64 * rank)(*shape)
        with checked() as status:
            tensor = calls.TF_ForwardInputOrAllocateOutput(
                self._pointer, byref(candidate), 1, index, dimensions, rank, byref(forwarded), status
            )
        return tensor, forwarded.value == index

    def fail(self, code: int, message: str) -> None:
        """The operation has failed: the user gets the error of TensorFlow for ``code``."""
        with status_of(code, message) as status:
            calls.TF_OpKernelContext_Failure(self._pointer, status)
