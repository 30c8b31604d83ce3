"""How runs of nodes begin: in the order of their lane, and the first of a world when the ranks have met."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from collectives import Engine, InvalidRequestError, Work
from hvd_cluster.core import basics
from hvd_cluster.graphs.completer import completer
from hvd_cluster.graphs.lanes import Lane, LaneChooser, Lanes
from hvd_cluster.graphs.run import Kernel, KernelContext, NodeRun


class Collective(Kernel, Protocol):
    """A node that submits works. ``lanes`` chooses the lane of a run."""

    lanes: LaneChooser

    def has_entered(self, engine: Engine) -> bool:
        """Whether it may start in the world of ``engine`` at once."""

    def enter(self, engine: Engine) -> None:
        """Wait for the other ranks before the first start in the world of ``engine``."""

    def start(self, context: Any, engine: Engine, lane: Lane) -> Sequence[Work]:
        """Submit the works of a run."""


class Join(Kernel, Protocol):
    """A node that waits until all ranks have joined."""

    def wait(self, engine: Engine) -> int:
        """Wait; returns the last rank."""

    def put(self, context: Any, last: int) -> None:
        """Give the output."""


_lanes = Lanes()


def begin(kernel: Collective, context: KernelContext, done: Callable[[], None]) -> None:
    """Begin a run when its turn has come. Another thread calls ``done`` at its end."""
    try:
        lane = kernel.lanes.choose(context)
    except InvalidRequestError as error:
        fail(context, error, done)
    else:
        _lanes.enter((kernel, lane), partial(_submit, kernel, context, done, lane))


def _submit(kernel: Collective, context: KernelContext, done: Callable[[], None], lane: Lane) -> None:
    leave = partial(_lanes.leave, (kernel, lane))
    try:
        run = NodeRun(kernel, context, basics.engine(), (), done, leave, context.step)
        if not completer.admit(run):
            return
        if kernel.has_entered(run.engine):
            _start(kernel, run, context, lane)
        else:
            _start_aside(kernel, run, context, lane)
    except BaseException as error:  # noqa: BLE001 - the framework raises it
        fail(context, error, done)
        leave()


def _start(kernel: Collective, run: NodeRun, context: KernelContext, lane: Lane) -> None:
    try:
        run.works = kernel.start(context, run.engine, lane)
    except InvalidRequestError as error:
        run.error = error
    except BaseException:
        completer.withdraw(run)
        raise
    completer.follow(run)


def _start_aside(kernel: Collective, run: NodeRun, context: KernelContext, lane: Lane) -> None:
    """Start a run that waits for the other ranks before it begins: the first one in a world."""
    # Owned by the run. Its wait ends when all ranks have begun, or with the engine.
    thread = threading.Thread(target=_enter, args=(kernel, run, context, lane), name="hvd-graph-enter", daemon=True)
    try:
        thread.start()
    except BaseException:  # there are too many, or the interpreter ends
        completer.withdraw(run)
        raise


def _enter(kernel: Collective, run: NodeRun, context: KernelContext, lane: Lane) -> None:
    try:
        kernel.enter(run.engine)
    except Exception as error:  # noqa: BLE001 - the framework raises it
        run.error = error
        completer.follow(run)
        return
    try:
        _start(kernel, run, context, lane)
    except BaseException as error:  # noqa: BLE001 - the framework raises it
        fail(context, error, run.done)
        run.leave()


def begin_join(kernel: Join, context: KernelContext, done: Callable[[], None]) -> None:
    """Begin a run of a node that joins. Another thread calls ``done`` at its end."""
    # Owned by the run. Its wait ends when all ranks have joined, or with the engine.
    thread = threading.Thread(target=_wait, args=(kernel, context, done), name="hvd-graph-join", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # there are too many, or the interpreter ends
        fail(context, error, done)


def _wait(kernel: Join, context: KernelContext, done: Callable[[], None]) -> None:
    """Join, and end the run, unless it has ended with another node of its step. Then this rank stays joined."""
    try:
        engine = basics.engine()
        run = NodeRun(kernel, context, engine, (), done, _stay, context.step)
        if not completer.accompany(run):
            return
    except Exception as error:  # noqa: BLE001 - the framework raises it
        fail(context, error, done)
        return
    joined: Future[int] = Future()
    try:
        joined.set_result(kernel.wait(engine))
    except Exception as error:  # noqa: BLE001 - it is raised below, if anybody wants to know
        joined.set_exception(error)
    if completer.claim(run):
        _end_join(kernel, context, done, joined)


def _end_join(kernel: Join, context: KernelContext, done: Callable[[], None], joined: Future[int]) -> None:
    try:
        kernel.put(context, joined.result())
    except Exception as error:  # noqa: BLE001 - the framework raises it
        fail(context, error, done)
    else:
        done()


def _stay() -> None:
    """The run is in no lane."""


def fail(context: KernelContext, error: BaseException, done: Callable[[], None], is_in_graph: bool = True) -> None:
    """End the run of a kernel with ``error``. After an interrupt the engine may go on, and ask for an output later.

    The framework hears of it first, then other nodes of the run of the graph: their errors would hide this one.
    """
    step = context.step
    context.end()
    context.report(error)
    done()
    if is_in_graph:
        completer.give_up(step)
