"""Where TensorFlow calls Python: the three functions of each kernel. None of them raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Protocol

from hvd_cluster.graphs import beginnings
from hvd_cluster.tensorflow.errors import ABANDONED, as_status
from hvd_cluster.tensorflow.kernels.node import GraphNode, JoinKernel
from hvd_cluster.tensorflow.native.context import Context
from hvd_cluster.tensorflow.native.done import Done, take
from hvd_cluster.tensorflow.native.library import long_calls, status_of
from hvd_cluster.tensorflow.native.registration import Construction, Definition, register


class RunContext(Context):
    """A :class:`hvd_cluster.graphs.run.KernelContext`."""

    __slots__ = ()

    def report(self, error: BaseException | None = None) -> None:
        """The user gets TensorFlow's error for ``error``; without one, that of an abandoned run."""
        self.fail(*(ABANDONED if error is None else as_status(error)))


class OpKernel(Protocol):
    """The computation of a node, each time that TensorFlow reaches it."""

    def run(self, context: RunContext) -> None:
        """Set the outputs before it returns; an exception becomes the error of the node."""


_kernels: dict[int, OpKernel] = {}
_numbers = count(1)
_callers: set[int] = set()


@contextmanager
def calling() -> Iterator[None]:
    """Inside, a kernel that runs on this thread was called by it, and may wait: TensorFlow does not need the thread."""
    me = threading.get_ident()
    _callers.add(me)
    try:
        yield
    finally:
        _callers.discard(me)


def _is_called() -> bool:
    return threading.get_ident() in _callers


def make_known(definition: Definition, make: Callable[[Construction], OpKernel]) -> None:
    """Let TensorFlow know an op; ``make`` makes the kernel of a node."""
    register(definition, partial(_create, make), _compute, _delete)


def _create(make: Callable[[Construction], OpKernel], pointer: int) -> int:
    construction = Construction(pointer)
    try:
        kernel = make(construction)
    except Exception as error:  # noqa: BLE001 - TensorFlow raises it
        with status_of(*as_status(error)) as status:
            construction.fail(status)
        return 0
    number = next(_numbers)
    _kernels[number] = kernel
    return number


def _delete(number: int) -> None:
    _kernels.pop(number, None)


def _compute(number: int, pointer: int, callback: int) -> None:
    kernel, context = _kernels[number], RunContext(pointer)
    if isinstance(kernel, GraphNode | JoinKernel) and not _is_called():
        done = take(callback)
        if done is not None:
            _begin(kernel, context, done)
            return
    end = partial(long_calls.TF_RunAsyncOpKernelDoneCallback, callback)
    try:
        kernel.run(context)
    except BaseException as error:  # noqa: BLE001 - TensorFlow raises it
        beginnings.fail(context, error, end, is_in_graph=not _is_called())
    else:
        end()


def _begin(kernel: GraphNode | JoinKernel, context: RunContext, done: Done) -> None:
    """Let another thread end the run."""
    if isinstance(kernel, GraphNode):
        beginnings.begin(kernel, context, done)
    else:
        beginnings.begin_join(kernel, context, done)
