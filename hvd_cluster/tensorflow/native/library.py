"""The functions of TensorFlow's C API that an op needs."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ubyte, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import tensorflow as tf

from collectives import EngineError

CREATE = ctypes.CFUNCTYPE(c_void_p, c_void_p)
RUN_ASYNC = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)
DELETE = ctypes.CFUNCTYPE(None, c_void_p)
SHAPE = ctypes.CFUNCTYPE(None, c_void_p, c_void_p)


class _StringView(ctypes.Structure):
    """TF_StringView"""

    _fields_ = (("data", c_void_p), ("length", c_size_t))


class AllocatorAttributes(ctypes.Structure):
    """TF_AllocatorAttributes"""

    _fields_ = (("struct_size", c_size_t), ("on_host", c_ubyte))


_TEXT = (c_char_p,)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "TF_NewStatus": (c_void_p, ()),
    "TF_DeleteStatus": (None, (c_void_p,)),
    "TF_SetStatus": (None, (c_void_p, c_int, c_char_p)),
    "TF_GetCode": (c_int, (c_void_p,)),
    "TF_Message": (c_char_p, (c_void_p,)),
    # Definitions.
    "TF_NewOpDefinitionBuilder": (c_void_p, _TEXT),
    "TF_OpDefinitionBuilderAddInput": (None, (c_void_p, c_char_p)),
    "TF_OpDefinitionBuilderAddOutput": (None, (c_void_p, c_char_p)),
    "TF_OpDefinitionBuilderAddAttr": (None, (c_void_p, c_char_p)),
    "TF_OpDefinitionBuilderSetIsStateful": (None, (c_void_p, c_bool)),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, (c_void_p, SHAPE)),
    "TF_RegisterOpDefinition": (None, (c_void_p, c_void_p)),
    "TF_NewAsyncKernelBuilder": (c_void_p, (c_char_p, c_char_p, CREATE, RUN_ASYNC, DELETE)),
    "TF_KernelBuilder_HostMemory": (None, (c_void_p, c_char_p)),
    "TF_RegisterKernelBuilder": (None, (c_char_p, c_void_p, c_void_p)),
    # Shapes.
    "TF_NewShapeHandle": (c_void_p, ()),
    "TF_DeleteShapeHandle": (None, (c_void_p,)),
    "TF_ShapeInferenceContextNumInputs": (c_int64, (c_void_p,)),
    "TF_ShapeInferenceContextGetInput": (None, (c_void_p, c_int, c_void_p, c_void_p)),
    "TF_ShapeInferenceContextSetOutput": (None, (c_void_p, c_int, c_void_p, c_void_p)),
    "TF_ShapeInferenceContextScalar": (c_void_p, (c_void_p,)),
    "TF_ShapeInferenceContextVectorFromSize": (c_void_p, (c_void_p, c_size_t)),
    "TF_ShapeInferenceContextRank": (c_int64, (c_void_p, c_void_p)),
    "TF_ShapeInferenceContextRankKnown": (c_int, (c_void_p, c_void_p)),
    "TF_ShapeInferenceContextSubshape": (None, (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "TF_ShapeInferenceContextConcatenateShapes": (None, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    # Kernels.
    "TF_OpKernelConstruction_Failure": (None, (c_void_p, c_void_p)),
    "TF_OpKernelConstruction_GetName": (_StringView, (c_void_p,)),
    "TF_OpKernelConstruction_GetAttrSize": (
        None,
        (c_void_p, c_char_p, POINTER(c_int32), POINTER(c_int32), c_void_p),
    ),
    "TF_OpKernelConstruction_GetAttrString": (None, (c_void_p, c_char_p, c_char_p, c_size_t, c_void_p)),
    "TF_OpKernelConstruction_GetAttrInt64": (None, (c_void_p, c_char_p, POINTER(c_int64), c_void_p)),
    "TF_NumInputs": (c_int, (c_void_p,)),
    "TF_NumOutputs": (c_int, (c_void_p,)),
    "TF_GetInput": (None, (c_void_p, c_int, POINTER(c_void_p), c_void_p)),
    "TF_ExpectedOutputDataType": (c_int, (c_void_p, c_int)),
    "TF_AllocateOutput": (c_void_p, (c_void_p, c_int, c_int, POINTER(c_int64), c_int, c_size_t, c_void_p)),
    "TF_AllocateTemp": (c_void_p, (c_void_p, c_int, POINTER(c_int64), c_int, POINTER(AllocatorAttributes), c_void_p)),
    "TF_SetOutput": (None, (c_void_p, c_int, c_void_p, c_void_p)),
    "TF_ForwardInputOrAllocateOutput": (
        c_void_p,
        (c_void_p, POINTER(c_int), c_int, c_int, POINTER(c_int64), c_int, POINTER(c_int), c_void_p),
    ),
    "TF_StepId": (c_int64, (c_void_p,)),
    "TF_GetFrameId": (c_uint64, (c_void_p,)),
    "TF_GetIterId": (c_int64, (c_void_p,)),
    "TF_OpKernelContext_Failure": (None, (c_void_p, c_void_p)),
    "TF_RunAsyncOpKernelDoneCallback": (None, (c_void_p,)),
    # Tensors.
    "TF_TensorType": (c_int, (c_void_p,)),
    "TF_NumDims": (c_int, (c_void_p,)),
    "TF_Dim": (c_int64, (c_void_p, c_int)),
    "TF_TensorData": (c_void_p, (c_void_p,)),
    "TF_TensorByteSize": (c_size_t, (c_void_p,)),
    "TF_DeleteTensor": (None, (c_void_p,)),
}


def _path() -> str:
    """The library that ``import tensorflow`` has loaded: a second copy would have registries of its own."""
    name = "libtensorflow_framework.2.dylib" if sys.platform == "darwin" else "libtensorflow_framework.so.2"
    return str(Path(tf.__file__).parent / name)


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


calls = _declare(ctypes.PyDLL(_path()))
"""Short calls, which keep the GIL: to release it at each of them would let other threads cut an operation to pieces."""
long_calls = _declare(ctypes.CDLL(_path()))
"""Calls that may call back into Python on another thread, or take locks of TensorFlow for long: without the GIL."""


OK = 0


@contextmanager
def temporary() -> Iterator[int]:
    """A status for a few calls."""
    status = calls.TF_NewStatus()
    try:
        yield status
    finally:
        calls.TF_DeleteStatus(status)


@contextmanager
def checked() -> Iterator[int]:
    """A status for a few calls; EngineError at the end, unless all of them succeeded."""
    with temporary() as status:
        yield status
        if calls.TF_GetCode(status) != OK:
            raise EngineError(f"TensorFlow refuses a call of its C API: {calls.TF_Message(status).decode()}")


@contextmanager
def status_of(code: int, message: str) -> Iterator[int]:
    """A status that reports a failure."""
    with temporary() as status:
        calls.TF_SetStatus(status, code, message.encode("utf-8", "replace"))
        yield status
