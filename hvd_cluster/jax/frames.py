"""The structures of XLA's foreign function interface, as in ``xla/ffi/api/c_api.h`` of jaxlib."""

from __future__ import annotations

import ctypes as c
from typing import Any

METADATA, EXECUTE = 1, 3


class Extension(c.Structure):
    """XLA_FFI_Extension_Base"""

    _fields_ = (("struct_size", c.c_size_t), ("type", c.c_int), ("next", c.c_void_p))


class Version(c.Structure):
    """XLA_FFI_Api_Version"""

    _fields_ = (("struct_size", c.c_size_t), ("extension", c.c_void_p), ("major", c.c_int), ("minor", c.c_int))


class Metadata(c.Structure):
    """XLA_FFI_Metadata"""

    _fields_ = (("struct_size", c.c_size_t), ("version", Version), ("traits", c.c_uint32))


class MetadataExtension(c.Structure):
    """XLA_FFI_Metadata_Extension"""

    _fields_ = (("base", Extension), ("metadata", c.POINTER(Metadata)))


class FFIBuffer(c.Structure):
    """XLA_FFI_Buffer"""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.c_void_p),
        ("dtype", c.c_int),
        ("data", c.c_void_p),
        ("rank", c.c_int64),
        ("dims", c.POINTER(c.c_int64)),
    )


class Buffers(c.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets"""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.c_void_p),
        ("size", c.c_int64),
        ("types", c.c_void_p),
        ("items", c.POINTER(c.POINTER(FFIBuffer))),
    )


class Scalar(c.Structure):
    """XLA_FFI_Scalar, of an integer of 64 bits"""

    _fields_ = (("dtype", c.c_int), ("value", c.POINTER(c.c_int64)))


class FFIAttributes(c.Structure):
    """XLA_FFI_Attrs, of scalars"""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.c_void_p),
        ("size", c.c_int64),
        ("types", c.c_void_p),
        ("names", c.c_void_p),
        ("items", c.POINTER(c.POINTER(Scalar))),
    )


class ErrorArguments(c.Structure):
    """XLA_FFI_Error_Create_Args"""

    _fields_ = (("struct_size", c.c_size_t), ("extension", c.c_void_p), ("message", c.c_char_p), ("code", c.c_int))


_CreateError = c.CFUNCTYPE(c.c_void_p, c.POINTER(ErrorArguments))


class Api(c.Structure):
    """The beginning of XLA_FFI_Api"""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.c_void_p),
        ("version", Version),
        ("internal", c.c_void_p),
        ("create_error", _CreateError),
    )


class CallFrame(c.Structure):
    """XLA_FFI_CallFrame"""

    _fields_ = (
        ("struct_size", c.c_size_t),
        ("extension", c.POINTER(Extension)),
        ("api", c.POINTER(Api)),
        ("context", c.c_void_p),
        ("stage", c.c_int),
        ("arguments", Buffers),
        ("results", Buffers),
        ("attributes", FFIAttributes),
    )


def create_error(frame: Any, code: int, message: str) -> int | None:
    """An error that XLA owns once the handler has returned it."""
    arguments = ErrorArguments(c.sizeof(ErrorArguments), None, message.encode(), code)
    pointer: int | None = frame.api.contents.create_error(c.byref(arguments))
    return pointer
