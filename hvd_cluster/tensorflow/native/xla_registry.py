"""XLA's registry of functions that a compiled program may call, and the way in which such a function fails.

TensorFlow's library exports them as functions of C++, whose layouts nobody promises. So they are used only on the
systems and versions where tests have run, and a look-up shows that the registration has worked.

A ``std::string`` of libstdc++ is a pointer, a length, and 16 bytes for short texts. The status of a call is a
``std::optional<std::string>``: a string, and a byte that says whether there is one.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import tensorflow as tf

from hvd_cluster.tensorflow.native.done import NEWEST, OLDEST, is_known

TARGET = b"hvd_cluster"
PLATFORM = b"Host"
_STRING = "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
GLOBAL = "_ZN3xla24CustomCallTargetRegistry6GlobalEv"
REGISTER = f"_ZN3xla24CustomCallTargetRegistry8RegisterE{_STRING}PvS8_"
LOOK_UP = f"_ZNK3xla24CustomCallTargetRegistry6LookupE{_STRING}S8_"
NEW = "_Znwm"
ROOM = 15
"""Characters that a string holds without memory of its own."""

Addresses: TypeAlias = Any
"""A pointer to pointers; where there is one output only, its address is that of the output itself."""
Handler: TypeAlias = Callable[[int, Addresses, int], None]
"""Does the call with a number: the address of the outputs, the inputs, the number. An exception fails the call."""

_Function = c.CFUNCTYPE(None, c.c_void_p, c.POINTER(c.c_void_p), c.c_void_p, c.c_size_t, c.c_void_p)


class _String(c.Structure):
    _fields_ = (("data", c.c_void_p), ("length", c.c_size_t), ("room", c.c_char * 16))


class _Status(c.Structure):
    _fields_ = (("text", _String), ("is_there", c.c_bool))


def _string(text: bytes) -> _String:
    """For arguments that are only read. The memory is that of ``text``."""
    return _String(c.cast(c.c_char_p(text), c.c_void_p).value, len(text))


def fail(status: int, text: str) -> None:
    """The call ends with ``text``; XLA frees its memory."""
    encoded, error = text.encode("utf-8", "replace"), _Status.from_address(status)
    size = len(encoded)
    room = status + _String.room.offset
    address = room if size <= ROOM else _new()(size + 1)
    c.memmove(address, encoded + b"\0", size + 1)
    error.text.data, error.text.length = address, size
    if address != room:
        c.cast(room, c.POINTER(c.c_size_t))[0] = size  # the capacity of the memory takes the place of a short text
    error.is_there = True


@cache
def _new() -> Any:
    """``operator new``, because XLA deletes the text."""
    new = getattr(c.CDLL("libstdc++.so.6"), NEW)
    new.restype, new.argtypes = c.c_void_p, (c.c_size_t,)
    return new


@cache
def _library() -> c.CDLL:
    """That which ``import tensorflow`` has loaded."""
    return c.CDLL(str(Path(tf.__file__).parent / "libtensorflow_cc.so.2"))


_registered: list[Any] = []
"""What XLA calls must live until the end of the process."""


def register(function: Any) -> str | None:
    """Let XLA call ``function`` by the name TARGET; returns the reason why that is not possible, if it is not."""
    if not is_known():
        versions = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        return f"it is tested with TensorFlow {versions[0]} to {versions[1]} on Linux, and this is {tf.__version__}"
    try:
        library = _library()
        _new()
        registry, register, look_up = (getattr(library, name) for name in (GLOBAL, REGISTER, LOOK_UP))
    except (OSError, AttributeError) as error:
        return f"this build of TensorFlow does not export what is needed: {error}"
    registry.restype = look_up.restype = c.c_void_p
    address = c.cast(function, c.c_void_p)
    name, platform = _string(TARGET), _string(PLATFORM)
    where = c.c_void_p(registry())
    if look_up(where, c.byref(name), c.byref(platform)):  # XLA ends the process at a second registration
        return f"another function is registered with XLA by the name {TARGET.decode()!r}"
    register(where, c.byref(name), address, c.byref(platform))
    if look_up(where, c.byref(name), c.byref(platform)) != address.value:
        return "XLA does not find the function that was registered"
    _registered.append(function)
    return None


def as_function(handle: Handler, describe: Callable[[BaseException], str]) -> Any:
    """What XLA can call. No exception passes it, or XLA would go on with outputs that nobody has written."""

    def call(out: int, inputs: Addresses, text: int, length: int, status: int) -> None:
        try:
            handle(out, inputs, int(c.string_at(text, length)))
        except BaseException as error:  # noqa: BLE001 - XLA raises it
            fail(status, describe(error))

    return _Function(call)
