"""The attributes of a node, which a kernel reads once, when TensorFlow makes it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int32, c_int64, create_string_buffer

from hvd_cluster.tensorflow.native.library import calls
from hvd_cluster.tensorflow.native.status import checked

__all__ = ["Construction"]


class Construction:
    """A kernel that is being made, and its node."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    @property
    def name(self) -> str:
        """The name of the node in the graph that runs, in which functions are inlined."""
        view = calls.TF_OpKernelConstruction_GetName(self._pointer)
        return ctypes.string_at(view.data, view.length).decode()

    def text(self, attribute: str) -> str:
        """The value of an attribute of the type string."""
        name, items, size = attribute.encode(), c_int32(), c_int32()
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrSize(self._pointer, name, byref(items), byref(size), status)
        value = create_string_buffer(size.value + 1)
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrString(self._pointer, name, value, size.value, status)
        return value.raw[: size.value].decode()

    def integer(self, attribute: str) -> int:
        """The value of an attribute of the type int."""
        value = c_int64()
        with checked() as status:
            calls.TF_OpKernelConstruction_GetAttrInt64(self._pointer, attribute.encode(), byref(value), status)
        return value.value

    def fail(self, status: int) -> None:
        """The kernel cannot be made."""
        calls.TF_OpKernelConstruction_Failure(self._pointer, status)
