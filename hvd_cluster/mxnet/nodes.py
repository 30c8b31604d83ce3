"""Collectives as nodes of MXNet's dependency engine: callers do not wait, and reads and writes find their order.

Each array has a node of its own, which writes it: a node that has one variable twice waits for itself for ever. So the
arrays of a group must be of different variables. A call is submitted when its last node has started. MXNet gets a
number for each node, and no deleter, which it may call when Python has ended. Nodes also run on arrays with errors,
which stay there: MXNet would skip these nodes, and their calls would never be over.
"""

from __future__ import annotations

import atexit
import ctypes as c
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXNetError, check_call

from collectives import Buffer, HorovodInternalError, InvalidRequestError, Operation, override
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.graphs.calls import PendingCall, forget, naming
from hvd_cluster.mxnet.arrays import Array, buffer_in_node, buffer_now

EXIT_SECONDS = 5.0
"""How long a process that ends with an exception waits for its nodes: other ranks may never come."""
# MXNet reads it when it starts. That engine waits in each push, and drops errors.
IS_NAIVE = os.environ.get("MXNET_ENGINE_TYPE") == "NaiveEngine"


class CollectiveError(HorovodInternalError, MXNetError):  # type: ignore[misc]
    """A collective failed, in a call that waits for its result. Of other calls MXNet raises a plain MXNetError."""


class InvalidCallError(InvalidRequestError, MXNetError):  # type: ignore[misc]
    """The call is wrong on this rank."""


class _Completion(c.Structure):
    """What MXNet wants to be called, once and from any thread, when a node has ended."""

    _fields_ = (("callback", c.c_void_p), ("engine", c.c_void_p), ("parameter", c.c_void_p))


_CPU = (c.c_int32 * 2)(1, 0)  # the type of a device, and its number
_PRIORITIZED = c.c_int(3)  # the threads that take the node of the highest priority first
_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_void_p)
_START = c.CFUNCTYPE(None, *[c.c_void_p] * (3 if mx.__version__.startswith("1.") else 4))
_ERRORS = c.CDLL("libstdc++.so.6")
_ERROR_BYTES = 64  # more than a std::runtime_error has
_nodes: dict[int, NodeCall] = {}
_pending: set[NodeCall] = set()
_numbers = count(1)
_push = _LIB.MXEnginePushAsyncND
_push.argtypes = [
    *(_START, c.c_void_p, c.c_void_p, c.c_void_p),  # function, its parameter, deleter, context
    *(c.c_void_p, c.c_int, c.c_void_p, c.c_int),  # arrays that are read, arrays that are written
    *(c.POINTER(c.c_int), c.c_int, c.c_char_p, c.c_bool),  # kind, priority, name, whether to run after errors
]


@contextmanager
def calling(operation: Operation, name: Any, process_set: ProcessSet, tensors: Any = None) -> Iterator[str]:
    """Around a public operation, on one tensor or on the group of ``tensors``; gives its name.

    The other ranks hear of a call that is refused, and errors are MXNetErrors. Autograd records nothing: it would take
    the copy for the operation.
    """
    try:
        with naming(operation, name, process_set, tensors) as label, mx.autograd.pause():
            yield label
    except InvalidRequestError as error:
        raise InvalidCallError(str(error)) from error
    except HorovodInternalError as error:
        raise CollectiveError(str(error)) from error


class NodeCall(PendingCall):
    """A call that overwrites ``arrays``, each by a node; the others are arguments of :class:`PendingCall`."""

    def __init__(self, operation: Operation, arrays: Sequence[Array], *arguments: Any, **others: Any) -> None:
        super().__init__(operation, len(arrays), *arguments, **others)
        self._arrays = arrays
        self._completions: list[_Completion] = []

    def push(self, priority: int) -> None:
        """Give the nodes to MXNet; those of a higher ``priority`` start first. With NaiveEngine, wait."""
        if IS_NAIVE:
            self.run()
            return
        _pending.add(self)
        self.take_turn()
        label = f"hvd_{self.operation.label}".encode()
        for array in self._arrays:
            number = next(_numbers)
            _nodes[number] = self
            written = (c.c_void_p * 1)(array.handle)
            check_call(_push(_start, number, None, _CPU, None, 0, written, 1, _PRIORITIZED, priority, label, True))

    @override
    def buffers(self) -> Sequence[Buffer]:
        look_up = buffer_now if IS_NAIVE else buffer_in_node
        return [look_up(array) for array in self._arrays]

    def start_node(self, completion: _Completion) -> None:
        """A node may use its array now."""
        self._completions.append(completion)
        self.arrive()

    @override
    def over(self, error: BaseException | None) -> None:
        for completion in self._completions:
            _complete(completion, error)
        _pending.discard(self)


def _complete(completion: _Completion, error: BaseException | None) -> None:
    """MXNet copies the error, a ``std::runtime_error``, and raises it where somebody waits for the array."""
    call = _CALLBACK(completion.callback)
    if error is None:
        call(completion.engine, completion.parameter, None)
        return
    memory = c.create_string_buffer(_ERROR_BYTES)
    _ERRORS._ZNSt13runtime_errorC1EPKc(memory, str(error).replace("\0", " ").encode())
    call(completion.engine, completion.parameter, c.addressof(memory))
    _ERRORS._ZNSt13runtime_errorD1Ev(memory)


@_START  # type: ignore[untyped-decorator]
def _start(*pointers: int) -> None:
    """MXNet calls it on a thread of its own when a node may use its array; it raises nothing."""
    completion = _Completion.from_buffer_copy(c.string_at(pointers[-2], c.sizeof(_Completion)))
    _nodes.pop(pointers[-1]).start_node(completion)


def _drain() -> None:
    """At the end of Python, before our engine ends: threads of MXNet must not call into it any more."""
    deadline = time.monotonic() + EXIT_SECONDS
    while _pending and time.monotonic() < deadline and getattr(sys, "last_value", None) is not None:
        time.sleep(0.001)
    if _pending and getattr(sys, "last_value", None) is not None:
        basics.shutdown()  # which ends what other ranks do not take part in
    _LIB.MXNDArrayWaitAll()


def _forget() -> None:
    """In a forked child: the nodes are the parent's. MXNet starts threads of its own."""
    _nodes.clear()
    _pending.clear()
    forget()


atexit.register(_drain)
# MXNet ends its threads before a fork, and waits for nodes: while fork holds the lock of Python, none of them ends.
os.register_at_fork(before=_LIB.MXNDArrayWaitAll, after_in_child=_forget)
