"""Where TensorFlow calls Python: the three functions of each kernel. None of them raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Protocol

from collectives.api import InvalidRequestError
from hvd_cluster import basics
from hvd_cluster.graphs.completer import completer
from hvd_cluster.graphs.lanes import Lane, Lanes
from hvd_cluster.graphs.run import Run
from hvd_cluster.tensorflow.errors import as_status
from hvd_cluster.tensorflow.kernels.context import RunContext
from hvd_cluster.tensorflow.kernels.members import Join
from hvd_cluster.tensorflow.kernels.node import Node
from hvd_cluster.tensorflow.native.construction import Construction
from hvd_cluster.tensorflow.native.done import Done, take
from hvd_cluster.tensorflow.native.library import long_calls
from hvd_cluster.tensorflow.native.registration import Definition, register
from hvd_cluster.tensorflow.native.status import status_of

__all__ = ["Kernel", "calling", "make_known"]


class Kernel(Protocol):
    """The computation of a node, each time that TensorFlow reaches it. ``waits``: whether it waits for other ranks."""

    waits: bool

    def run(self, context: RunContext) -> None:
        """Set the outputs before it returns; an exception becomes the error of the node."""


_kernels: dict[int, Kernel] = {}
_numbers = count(1)
_callers: set[int] = set()
_lanes = Lanes()


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


def make_known(definition: Definition, make: Callable[[Construction], Kernel]) -> None:
    """Let TensorFlow know an op; ``make`` makes the kernel of a node."""
    register(definition, partial(_create, make), _compute, _delete)


def _create(make: Callable[[Construction], Kernel], pointer: int) -> int:
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
    done = take(callback) if kernel.waits and not _is_called() else None
    if done is not None:
        _begin(kernel, context, done)
        return
    end = partial(long_calls.TF_RunAsyncOpKernelDoneCallback, callback)
    try:
        kernel.run(context)
    except BaseException as error:  # noqa: BLE001 - TensorFlow raises it
        _fail(context, error, end)
    else:
        end()


def _begin(kernel: Kernel, context: RunContext, done: Done) -> None:
    """Let another thread end the run."""
    if isinstance(kernel, Node):
        _take_turn(kernel, context, done)
        return
    # Owned by the run. Its wait ends when all ranks have joined, or with the engine.
    thread = threading.Thread(target=_wait, args=(kernel, context, done), name="hvd-tensorflow-wait", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # there are too many, or the interpreter ends
        _fail(context, error, done)


def _take_turn(kernel: Node, context: RunContext, done: Done) -> None:
    try:
        lane = kernel.lanes.choose(context)
    except InvalidRequestError as error:
        _fail(context, error, done)
    else:
        _lanes.enter((kernel, lane), partial(_submit, kernel, context, done, lane))


def _submit(kernel: Node, context: RunContext, done: Done, lane: Lane) -> None:
    leave = partial(_lanes.leave, (kernel, lane))
    try:
        run = Run(kernel, context, basics.engine(), (), done, leave, context.step)
        if not completer.admit(run):
            return
        if kernel.has_entered(run.engine):
            _start(kernel, run, context, lane)
        else:
            _start_aside(kernel, run, context, lane)
    except BaseException as error:  # noqa: BLE001 - TensorFlow raises it
        _fail(context, error, done)
        leave()


def _start(kernel: Node, run: Run, context: RunContext, lane: Lane) -> None:
    try:
        run.works = kernel.start(context, run.engine, lane)
    except InvalidRequestError as error:
        run.error = error
    except BaseException:
        completer.withdraw(run)
        raise
    completer.follow(run)


def _start_aside(kernel: Node, run: Run, context: RunContext, lane: Lane) -> None:
    """Start a run that waits for the other ranks before it begins: the first one in a world."""
    # Owned by the run. Its wait ends when all ranks have begun, or with the engine.
    thread = threading.Thread(
        target=_enter, args=(kernel, run, context, lane), name="hvd-tensorflow-enter", daemon=True
    )
    try:
        thread.start()
    except BaseException:  # there are too many, or the interpreter ends
        completer.withdraw(run)
        raise


def _enter(kernel: Node, run: Run, context: RunContext, lane: Lane) -> None:
    try:
        kernel.enter(run.engine)
    except Exception as error:  # noqa: BLE001 - TensorFlow raises it
        run.error = error
        completer.follow(run)
        return
    try:
        _start(kernel, run, context, lane)
    except BaseException as error:  # noqa: BLE001 - TensorFlow raises it
        _fail(context, error, run.done)
        run.leave()


def _wait(kernel: Join, context: RunContext, done: Done) -> None:
    """Join, and end the run, unless it has ended with another node of its step. Then this rank stays joined."""
    try:
        engine = basics.engine()
        run = Run(kernel, context, engine, (), done, _stay, context.step)
        if not completer.accompany(run):
            return
    except Exception as error:  # noqa: BLE001 - TensorFlow raises it
        _fail(context, error, done)
        return
    joined: Future[int] = Future()
    try:
        joined.set_result(kernel.wait(engine))
    except Exception as error:  # noqa: BLE001 - it is raised below, if anybody wants to know
        joined.set_exception(error)
    if completer.claim(run):
        _end_join(kernel, context, done, joined)


def _end_join(kernel: Join, context: RunContext, done: Done, joined: Future[int]) -> None:
    try:
        kernel.put(context, joined.result())
    except Exception as error:  # noqa: BLE001 - TensorFlow raises it
        _fail(context, error, done)
    else:
        done()


def _stay() -> None:
    """The run is in no lane."""


def _fail(context: RunContext, error: BaseException, done: Callable[[], None]) -> None:
    """End the run of a kernel with ``error``. After an interrupt the engine may go on, and ask for an output later.

    TensorFlow hears of it first, then other nodes of the run of the graph: their errors would hide this one.
    """
    step = context.step
    context.end()
    context.report(error)
    done()
    if not _is_called():
        completer.give_up(step)
