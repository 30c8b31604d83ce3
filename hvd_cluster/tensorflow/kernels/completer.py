"""Ends the runs of kernels that a graph has begun."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.engine.engine import Engine
from collectives.engine.work import Watch, Work
from hvd_cluster.tensorflow.errors import ABANDONED, as_status
from hvd_cluster.tensorflow.kernels.collective import Collective
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["Completer", "Run", "completer"]

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long the thread waits for the next run before it ends."""
KEPT_STEPS = 64
"""The number of failed runs of graphs whose nodes may still come."""
YIELDS = 8
"""The number of times that the thread yields its core without a new run, before it waits for the submitted ones."""


@dataclass(slots=True, eq=False)
class Run:
    """A kernel that has submitted its ``works`` to ``engine``, in the run of a graph with the number ``step``.

    ``done`` gives it back to TensorFlow; ``leave`` lets the next run begin that waits for its turn.
    """

    kernel: Collective
    context: Context
    engine: Engine
    works: Sequence[Work]
    done: Callable[[], None]
    leave: Callable[[], None]
    step: int

    @property
    def is_over(self) -> bool:
        """Whether all works are done."""
        return all([work.done for work in self.works])

    def end(self) -> bool:
        """Set the outputs, or the error; return whether it is the outputs."""
        try:
            for work in self.works:
                work.outcome()
            self.kernel.finish(self.context, self.engine, self.works)
        except Exception as error:  # noqa: BLE001 - TensorFlow raises it
            self.context.fail(*as_status(error))
            return False
        return True

    def abandon(self, code: int, message: str) -> None:
        """Set an error, although the operation may go on: it keeps the memory of its tensors."""
        self.context.end()
        self.context.fail(code, message)

    def give_back(self) -> None:
        """TensorFlow goes on. The memory of the tensors of works that are done has no other owner then."""
        self.works = ()
        self.done()


class Completer:
    """Waits for the works of all runs, which may end in any order, and drives the engine meanwhile.

    TensorFlow begins no other node of a run of a graph, a *step*, in which a node has failed, and waits for those that
    have begun. On the other ranks these may never begin, so they are abandoned.
    """

    def __init__(self) -> None:
        # Owned by this object, held for a look at all runs.
        self._lock = threading.Lock()
        self._runs: list[Run] = []
        self._failed: deque[int] = deque(maxlen=KEPT_STEPS)
        # Of the thread while it waits: whoever interrupts the watch rouses the engine.
        self._wait: tuple[Watch, Engine] | None = None
        # Those that the thread has taken and not ended yet.
        self._ending: deque[Run] = deque()
        # Owned by the thread, which waits for it at most IDLE_SECONDS and then ends.
        self._came = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, run: Run) -> None:
        """End ``run`` when its works are done; from any thread.

        RuntimeError, and ``run`` is not followed, if the thread cannot start.
        """
        with self._lock:
            if self._thread is None:
                # Owned by this object. It ends when it is idle; an engine that ends ends all that it waits for.
                thread = threading.Thread(target=self._complete, name="hvd-tensorflow", daemon=True)
                thread.start()
                self._thread = thread
            self._runs.append(run)
        if not self._came.is_set():
            self._came.set()
        self._interrupt()

    def has_failed(self, step: int) -> bool:
        """Whether a node of ``step`` has failed: no other one shall begin."""
        return step in self._failed

    def give_up(self, step: int) -> None:
        """A node of ``step`` has failed that is not followed; from any thread."""
        with self._lock:
            self._record(step)
        self._interrupt()

    def _record(self, step: int) -> None:
        if step not in self._failed:
            self._failed.append(step)

    def _interrupt(self) -> None:
        """Let the thread look at the runs, if it waits for works."""
        wait = self._wait
        if wait is not None and not wait[0].interrupted:
            wait[0].interrupted = True
            wait[1].rouse()

    def _complete(self) -> None:
        try:
            while self._await_runs():
                self._let_others_submit()
                self._await_any()
                self._end_all()
        except Exception as error:
            logger.exception("the thread that ends collectives of graphs has failed; those in flight fail with it")
            self._break(error)

    def _await_runs(self) -> bool:
        """Wait for a run; False if this thread shall end."""
        while not self._runs:
            self._came.clear()
            if not self._runs and not self._came.wait(IDLE_SECONDS):
                with self._lock:
                    if not self._runs:
                        self._thread = None
                        return False
        return True

    def _let_others_submit(self) -> None:
        """The nodes of a graph come in bursts. To wait for the first would send it alone, and nothing would fuse."""
        seen, yields = 0, 0
        while yields < YIELDS:
            count = len(self._runs)
            yields = yields + 1 if count == seen else 0
            seen = count
            os.sched_yield()

    def _await_any(self) -> None:
        """Wait until a run may have to end. A change of the world leaves runs of two engines: one after the other."""
        with self._lock:
            if any(self._must_end(run) for run in self._runs):
                return
            engine = self._runs[0].engine
            watch = Watch([work for run in self._runs if run.engine is engine for work in run.works])
            self._wait = watch, engine
        try:
            engine.await_any(watch)
        finally:
            self._wait = None

    def _must_end(self, run: Run) -> bool:
        return run.is_over or self.has_failed(run.step)

    def _end_all(self) -> None:
        """End all runs that must end. One that fails lets others of its step end."""
        while self._take():
            while self._ending:
                self._end(self._ending.popleft())

    def _take(self) -> bool:
        with self._lock:
            taken = [run for run in self._runs if self._must_end(run)]
            if taken:
                self._runs = [run for run in self._runs if run not in taken]
                self._ending.extend(taken)
        return bool(taken)

    def _end(self, run: Run) -> None:
        """TensorFlow hears of a failure first, then other nodes of the step: their errors would hide it."""
        succeeded = False
        try:
            if run.is_over:
                succeeded = run.end()
            else:
                run.abandon(*ABANDONED)
        finally:
            run.give_back()
            if not succeeded:
                self._record(run.step)
            run.leave()

    def _break(self, error: Exception) -> None:
        """Fail all runs; the next one starts another thread."""
        with self._lock:
            runs = [*self._ending, *self._runs]
            self._ending.clear()
            self._runs, self._thread = [], None
        for run in runs:
            run.abandon(*as_status(error))
            run.give_back()
            self.give_up(run.step)
            run.leave()

    def forget(self) -> None:
        """In a forked child: the thread and the runs are the parent's. Takes no lock."""
        self.__init__()  # type: ignore[misc]


completer = Completer()
os.register_at_fork(after_in_child=completer.forget)
