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
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXNetError, check_call

from collectives import Buffer, HorovodInternalError, InvalidRequestError, Operation, override
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.graphs.calls import PendingCall, forget, naming
from hvd_cluster.mxnet.arrays import Array, buffer_in_node, buffer_now

EXIT_SECONDS = 5.0  # a process that ends with an exception waits for its nodes so long: other ranks may never come
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
_PRIORITIZED = (c.c_int * 1)(3)  # the threads that take the node of the highest priority first
_CALLBACK = c.CFUNCTYPE(None, c.c_void_p, c.c_void_p, c.c_void_p)
_START = c.CFUNCTYPE(None, *[c.c_void_p] * (3 if mx.__version__.startswith("1.") else 4))
_ERRORS = c.CDLL("libstdc++.so.6")
_ERRORS_KEPT = 512  # of all nodes, until the next waitall()
_failing = threading.Lock()  # of this module: one thread at a time hands MXNet an error, which waits for nothing
_nodes: dict[int, Callable[[_Completion], None]] = {}
_pending: set[NodeCall] = set()
_numbers = count(1)
_LABELS = {each: f"hvd_{each.label}".encode() for each in Operation}  # MXNet keeps their addresses
_push = _LIB.MXEnginePushAsyncND
# Function, its parameter, deleter, context; arrays to read, to write; kind, priority, name; whether to run after errors
_push.argtypes = [_START, *[c.c_void_p] * 4, c.c_int, c.c_void_p, c.c_int, c.c_void_p, c.c_int, c.c_char_p, c.c_bool]


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
        for array in self._arrays:
            _push_node(self.start_node, array, priority, _LABELS[self.operation])

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


def _push_node(start: Callable[[_Completion], None], array: Array, priority: int, label: bytes) -> None:
    number, written = next(_numbers), (c.c_void_p * 1)(array.handle)
    _nodes[number] = start
    check_call(_push(_start, number, None, _CPU, None, 0, written, 1, _PRIORITIZED, priority, label, True))


def _complete(completion: _Completion, error: BaseException | None) -> None:
    """MXNet copies the error, a ``std::runtime_error``, and raises it where somebody waits for the array."""
    end = partial(_CALLBACK(completion.callback), completion.engine, completion.parameter)
    if error is None:
        end(None)
        return
    memory = c.create_string_buffer(64)  # more than that class has
    _ERRORS._ZNSt13runtime_errorC1EPKc(memory, str(error).replace("\0", " ").encode())
    with _failing:
        end(c.addressof(memory))
    _ERRORS._ZNSt13runtime_errorD1Ev(memory)


def _reserve() -> None:
    """Room for errors in a list of MXNet, which its threads read without a lock: it must not move while they do."""
    mx.nd.waitall()
    array, fail = mx.nd.zeros((1,)), partial(_complete, error=MXNetError())
    for _ in range(_ERRORS_KEPT):
        _push_node(fail, array, 0, b"")
    _LIB.MXNDArrayWaitAll()


@_START  # type: ignore[untyped-decorator]
def _start(*pointers: int) -> None:
    """MXNet calls it on a thread of its own when a node may use its array; it raises nothing."""
    completion = _Completion.from_buffer_copy(c.string_at(pointers[-2], c.sizeof(_Completion)))
    _nodes.pop(pointers[-1])(completion)


def _drain() -> None:
    """At the end of Python, before our engine ends: threads of MXNet must not call into it any more."""
    deadline, has_failed = time.monotonic() + EXIT_SECONDS, getattr(sys, "last_value", None) is not None
    while has_failed and _pending and time.monotonic() < deadline:
        time.sleep(0.001)
    if has_failed and _pending:
        basics.shutdown()  # which ends what other ranks do not take part in
    _LIB.MXNDArrayWaitAll()


def _forget() -> None:
    """In a forked child: the nodes are the parent's. MXNet starts threads of its own."""
    _nodes.clear()
    _pending.clear()
    forget()


_reserve()
atexit.register(_drain)
os.register_at_fork(before=_failing.acquire, after_in_parent=_failing.release, after_in_child=_failing.release)
# MXNet ends its threads before a fork, and waits for nodes: while fork holds the lock of Python, none of them ends.
os.register_at_fork(before=_LIB.MXNDArrayWaitAll, after_in_child=_forget)
