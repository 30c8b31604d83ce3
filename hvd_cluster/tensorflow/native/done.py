"""The end of an asynchronous kernel: TensorFlow's callback ``done``, which outlives the call that brings it.

The C API passes ``done`` as a pointer to a ``std::function<void()>``, which is a parameter of TensorFlow's own
``ComputeAsync``, so it is on the stack and destroyed when the kernel's function returns. An asynchronous kernel must
move it away first. In libstdc++ a ``std::function`` is four words: two of data (the callable itself, if it is small and
trivial, else a pointer to it), the *manager*, and the *invoker*. A move copies all four and clears the manager of the
original, whose destructor does nothing then. The manager, called with ``DESTROY``, destroys the copy.

No interface promises this. So it is done only on the systems and versions in :func:`is_known`, where tests have run,
and only if both functions lie in the code of TensorFlow's libraries: :func:`take` checks each pair once.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
from ctypes import c_bool, c_int, c_uint64, c_void_p
from functools import cache, lru_cache
from typing import Any

import tensorflow as tf

from hvd_cluster.tensorflow.native.library import long_calls

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (2, 18), (2, 21)
"""The versions of TensorFlow with which asynchronous kernels were tested."""
DESTROY = 3
_Function = c_uint64 * 4
_MANAGER, _INVOKER = 2, 3
_refused: set[tuple[int, ...]] = set()
"""The functions of callbacks that were left where they are."""
_Manage = ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p, c_int)


class Done:
    """The callback that ends one run of a kernel; to be called once."""

    __slots__ = ("_function",)

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self) -> None:
        """Let TensorFlow go on with what depends on this kernel."""
        address = ctypes.addressof(self._function)
        long_calls.TF_RunAsyncOpKernelDoneCallback(address)
        _manage(self._function[_MANAGER])(address, address, DESTROY)


@lru_cache(maxsize=64)
def _manage(address: int) -> Any:
    return _Manage(address)


def take(pointer: int) -> Done | None:
    """Move ``done`` away from the stack; None, and nothing has changed, where that is not certain to be right."""
    original = _Function.from_address(pointer)
    if not (is_known() and _is_understood(original[_MANAGER], original[_INVOKER])):
        return None
    copy = _Function(*original)
    original[_MANAGER] = 0
    return Done(copy)


def can_take() -> bool:
    """Whether :func:`take` succeeds, as far as is known: it has refused no callback yet.

    Kernels that wait must run in one order on all ranks. So the nodes of a graph may be independent only if it is true.
    """
    return is_known() and not _refused


@cache
def is_known() -> bool:
    """Whether this TensorFlow, on this system, is one with which asynchronous kernels were tested. Logs if it is not.

    Where it is not, a kernel waits for its operation, and the operations of a graph run one after the other.
    """
    version = tuple(int(part) for part in tf.__version__.split(".")[:2])
    known = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and OLDEST <= version <= NEWEST
    if not known:
        logger.warning(
            "collectives of a graph run one after the other, in the order in which they were traced: asynchronous ones "
            "are tested with TensorFlow %d.%d to %d.%d on Linux, and this is TensorFlow %s on %s",
            *(*OLDEST, *NEWEST, tf.__version__, sys.platform),
        )
    return known


@lru_cache(maxsize=256)
def _is_understood(*functions: int) -> bool:
    """Whether the manager and the invoker of a callback are code of TensorFlow."""
    if all(any(start <= each < end for start, end in _code_of_tensorflow()) for each in functions):
        return True
    _refused.add(functions)
    logger.warning("TensorFlow passes an unknown kind of callback: collectives of a graph run one after the other")
    return False


@cache
def _code_of_tensorflow() -> tuple[tuple[int, int], ...]:
    """The executable parts of this process's memory that are TensorFlow's."""
    parts = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and "x" in fields[1] and "tensorflow" in fields[5].rpartition("/")[2]:
                start, end = (int(address, 16) for address in fields[0].split("-"))
                parts.append((start, end))
    return tuple(parts)
