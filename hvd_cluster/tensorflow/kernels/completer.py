"""Ends the runs of kernels that a graph has begun."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from collectives.engine.engine import Engine
from collectives.engine.work import Watch, Work
from hvd_cluster.tensorflow.errors import as_status
from hvd_cluster.tensorflow.kernels.collective import Collective
from hvd_cluster.tensorflow.native.context import Context

__all__ = ["Completer", "Run", "completer"]

IDLE_SECONDS = 1.0
"""How long the thread waits for the next run before it ends."""
KEPT_STEPS = 64
"""The number of failed runs of graphs whose nodes may still come."""
YIELDS = 8
"""How often the thread lets others submit, after the last one that did, before it waits for what was submitted."""


@dataclass(slots=True, eq=False)
class Run:
    """A kernel that has submitted its ``works`` to ``engine``, in the run of a graph with the number ``step``."""

    kernel: Collective
    context: Context
    engine: Engine
    works: Sequence[Work]
    done: Callable[[], None]
    step: int

    @property
    def is_over(self) -> bool:
        """Whether all works are done."""
        return all([work.done for work in self.works])

    def end(self) -> bool:
        """Give TensorFlow the outputs, or the error; return whether it is the outputs.

        The memory of the tensors has no other owner then.
        """
        try:
            for work in self.works:
                work.outcome()
            self.kernel.finish(self.context, self.works)
        except Exception as error:  # noqa: BLE001 - TensorFlow raises it
            self.context.fail(*as_status(error))
            return False
        finally:
            self.works = ()
            self.done()
        return True

    def abandon(self) -> None:
        """Give TensorFlow an error, although the operation may go on: it keeps the memory of its tensors.

        TensorFlow begins no other node of a run of a graph in which a node has failed, and waits for those that have
        begun. On the other ranks this one may never begin.
        """
        self.context.end()
        self.context.fail(tf.errors.CANCELLED, "another collective of this run of the graph has failed")
        self.works = ()
        self.done()


class Completer:
    """Waits for the works of all runs, which may end in any order, and drives the engine meanwhile."""

    def __init__(self) -> None:
        # Owned by this object, held for a few instructions.
        self._lock = threading.Lock()
        self._runs: list[Run] = []
        self._works: list[Work] = []
        self._failed: deque[int] = deque(maxlen=KEPT_STEPS)
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
            self._works += run.works
        if not self._came.is_set():
            self._came.set()

    def _complete(self) -> None:
        while self._await_runs():
            self._let_others_submit()
            self._runs[0].engine.await_any(Watch(self._works))
            for run in self._taken(lambda run: run.is_over):
                if not run.end():
                    self._failed.append(run.step)
            for run in self._taken(lambda run: run.step in self._failed):
                run.abandon()

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
            count = len(self._works)
            yields = yields + 1 if count == seen else 0
            seen = count
            os.sched_yield()

    def _taken(self, has_ended: Callable[[Run], bool]) -> list[Run]:
        """The runs for which ``has_ended`` is true; they are not followed any more."""
        taken = [run for run in self._runs if has_ended(run)]
        if taken:
            with self._lock:
                self._runs = [run for run in self._runs if run not in taken]
                self._works[:] = [work for run in self._runs for work in run.works]
        return taken

    def forget(self) -> None:
        """In a forked child: the thread and the runs are the parent's. Takes no lock."""
        self.__init__()  # type: ignore[misc]


completer = Completer()
os.register_at_fork(after_in_child=completer.forget)
