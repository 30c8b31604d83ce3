"""Subnormal numbers, which a processor takes for zero if the mode of the thread says so.

TensorFlow switches that mode on in its own threads, and ``torch.set_flush_denormal`` in the calling one. A caller that
waits may sum numbers that another rank sums on its communication thread: both must get the same bits. The subnormal
numbers of float16 matter most: gradients below 6e-5 are.
"""

from __future__ import annotations

import ctypes
import platform
import sys

SMALLEST_NORMAL = sys.float_info.min
HALF = 0.5

_FLAGS = {
    "x86_64": (28, 0x8040),  # of MXCSR: flush to zero, denormals are zero
    "aarch64": (0, 0x1080000),  # of FPCR: flush to zero, in 32 and 64 and in 16 bits
}
"""By the name of the machine: where the control register lies in the C library's fenv_t, and its flags."""
_ROOM = 64
"""Bytes; fenv_t has 32 at most."""


class KeptSubnormals:
    """A block in which the thread keeps subnormal numbers; its mode is as before afterwards.

    For one thread at a time. Where the processor or the C library is not known it changes nothing.
    """

    def __init__(self) -> None:
        self._before = ctypes.create_string_buffer(_ROOM)
        self._inside = ctypes.create_string_buffer(_ROOM)
        self._is_changed = False

    def __enter__(self) -> None:
        self._is_changed = False  # an interrupt may have come between a change and its block
        if SMALLEST_NORMAL * HALF == 0.0 and _library is not None:  # inline: each call of a collective comes here
            self._change(_library)

    def __exit__(self, *_: object) -> None:
        if self._is_changed and _library is not None:
            self._is_changed = False
            _library.fesetenv(self._before)

    def _change(self, library: ctypes.PyDLL) -> None:
        offset, flags = _FLAGS[platform.machine()]
        library.fegetenv(self._before)
        self._inside.raw = self._before.raw
        register = ctypes.c_uint32.from_buffer(self._inside, offset)
        register.value &= ~flags
        self._is_changed = True
        library.fesetenv(self._inside)


def _find_library() -> ctypes.PyDLL | None:
    if platform.machine() not in _FLAGS:
        return None
    try:
        library = ctypes.PyDLL("libm.so.6")
        return library if library.fegetenv and library.fesetenv else None
    except (OSError, AttributeError):
        return None


_library = _find_library()
