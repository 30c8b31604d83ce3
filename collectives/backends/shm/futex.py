"""Sleeping on a word of shared memory: the Linux futex system call (futex(2)), by ctypes."""

from __future__ import annotations

import ctypes
import platform

__all__ = ["wait", "wake"]

_NUMBERS = {"x86_64": 202, "aarch64": 98, "ppc64le": 221, "s390x": 238, "riscv64": 98}
_NUMBER = _NUMBERS.get(platform.machine(), 202)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_ARGUMENTS = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)
_sleeping = ctypes.CDLL(None).syscall  # releases the GIL
_sleeping.argtypes = _ARGUMENTS
_waking = ctypes.PyDLL(None).syscall  # keeps the GIL: the call is over in a microsecond
_waking.argtypes = _ARGUMENTS


def wait(address: int, value: int, timeout: float) -> None:
    """Sleep while the word at ``address`` is ``value``, until woken, at most ``timeout`` seconds; may wake early."""
    limit = _Timespec(int(timeout), int(timeout % 1.0 * 1e9))
    _sleeping(_NUMBER, address, _WAIT, value, ctypes.byref(limit), None, 0)


def wake(address: int) -> None:
    """Wake all threads that sleep on the word at ``address``."""
    _waking(_NUMBER, address, _WAKE, _EVERYBODY, None, None, 0)
