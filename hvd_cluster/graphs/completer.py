"""Ends the runs of kernels that a graph has begun."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from functools import partial

from collectives import Engine, Watch
from hvd_cluster.graphs.run import NodeRun, Step
from hvd_cluster.graphs.settlement import Settlement, needs_settlement

logger = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long the thread waits for the next run before it ends."""
KEPT_STEPS = 64
"""The number of failed runs of graphs whose nodes may still come."""
YIELDS = 8
"""The number of times that the thread yields its core without a new run, before it waits for the submitted ones."""


class Completer:
    """Waits for the works of all runs, which may end in any order, and drives the engine meanwhile.

    A framework begins no other node of a run of a graph, a *step*, in which a node has failed, and waits for those that
    have begun. On the other ranks these may never begin, so they are abandoned. Where the ranks disagree, a
    :class:`Settlement` ends the step.
    """

    def __init__(self) -> None:
        # Owned by this object, held for a look at all runs.
        self._lock = threading.Lock()
        # Of settlements, which wait for less of ``_submitting``, no longer than Settlement allows.
        self._submitted = threading.Condition(self._lock)
        # Those that submit their works, each on a thread of the framework.
        self._submitting: list[NodeRun] = []
        # Those without works that wait on threads of their own.
        self._aside: list[NodeRun] = []
        self._runs: list[NodeRun] = []
        self._failed: deque[Step] = deque(maxlen=KEPT_STEPS)
        self._settlements: dict[Step, Settlement] = {}
        # Of the thread while it waits. A call that interrupts the watch must rouse the engine, too.
        self._wait: tuple[Watch, Engine] | None = None
        # Those that the thread has taken and not ended yet.
        self._ending: deque[NodeRun] = deque()
        # Owned by the thread, which waits for it at most IDLE_SECONDS and then ends.
        self._came = threading.Event()
        self._thread: threading.Thread | None = None

    def admit(self, run: NodeRun) -> bool:
        """Whether ``run`` may submit its works. Then :meth:`follow` or :meth:`withdraw` comes next; from any thread.

        Not where a node of its step has failed: it is ended like that. A settlement waits for those that are admitted.
        """
        return self._enters(run, self._submitting)

    def accompany(self, run: NodeRun) -> bool:
        """Whether ``run`` may wait on a thread of its own, which calls :meth:`claim` then.

        It ends when its step fails, as one that :meth:`admit` turns away; the thread may go on waiting.
        """
        return self._enters(run, self._aside)

    def claim(self, run: NodeRun) -> bool:
        """Whether the thread of an accompanied ``run`` ends it: its step has not failed."""
        with self._lock:
            is_there = run in self._aside
            if is_there:
                self._aside.remove(run)
        return is_there

    def _enters(self, run: NodeRun, runs: list[NodeRun]) -> bool:
        with self._lock:
            if not self.has_failed(run.step):
                runs.append(run)
                return True
            if self._is_settled_elsewhere(run):
                return False
        _cancel(run)
        return False

    def _take_aside(self, step: Step) -> list[NodeRun]:
        taken = [run for run in self._aside if run.step == step]
        self._aside = [run for run in self._aside if run.step != step]
        return taken

    def _end_aside(self, step: Step) -> None:
        with self._lock:
            taken = self._take_aside(step)
        for run in taken:
            _cancel(run)

    def withdraw(self, run: NodeRun) -> None:
        """An admitted ``run`` has failed before it was followed."""
        with self._lock:
            self._has_submitted(run)

    def _has_submitted(self, run: NodeRun) -> None:
        if run in self._submitting:
            self._submitting.remove(run)
            self._submitted.notify_all()

    def follow(self, run: NodeRun) -> None:
        """End ``run`` when its works are done; from any thread.

        RuntimeError, and ``run`` is not followed, if the thread cannot start.
        """
        with self._lock:
            is_settled = self._is_settled_elsewhere(run)
            self._has_submitted(run)
            if is_settled:
                return
            if self._thread is None:
                # Owned by this object. It ends when it is idle; an engine that ends ends all that it waits for.
                thread = threading.Thread(target=self._complete, name="hvd-graph", daemon=True)
                thread.start()
                self._thread = thread
            self._runs.append(run)
        if not self._came.is_set():
            self._came.set()
        self._interrupt()

    def runs_here(self) -> bool:
        """Whether the caller is on the thread that ends runs, as in a callback of one: it must not wait for another."""
        return self._thread is threading.current_thread()

    def has_failed(self, step: Step) -> bool:
        """Whether a node of ``step`` has failed: no other one shall begin."""
        return step in self._failed

    def _is_settled_elsewhere(self, run: NodeRun) -> bool:
        """Whether a settlement ends ``run``."""
        settlement = self._settlements.get(run.step)
        if settlement is not None:
            settlement.add(run)
        return settlement is not None

    def give_up(self, step: Step) -> None:
        """A node of ``step`` has failed that is not followed; from any thread."""
        with self._lock:
            self._record(step)
        self._end_aside(step)
        self._interrupt()

    def _record(self, step: Step) -> None:
        if step is not None and step not in self._failed:
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
                self._abandon_failed()
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

    def _abandon_failed(self) -> None:
        """Abandon all runs of steps that have failed."""
        for run in list(self._runs) if self._failed else ():
            if self.has_failed(run.step):
                run.abandon()

    def _await_any(self) -> None:
        """Wait until a run may have to end. A change of the world leaves runs of two engines: one after the other."""
        with self._lock:
            engine = self._runs[0].engine
            watch = Watch([work for run in self._runs if run.engine is engine for work in run.works if not work.done])
            if any(self._is_due(run) for run in self._runs):  # only now: each run has a work in the watch, or is over
                return
            self._wait = watch, engine
        try:
            engine.await_any(watch)
        finally:
            self._wait = None

    def _is_due(self, run: NodeRun) -> bool:
        return run.is_over or (self.has_failed(run.step) and not run.is_abandoned)

    def _end_all(self) -> None:
        """End all runs that are over."""
        while self._take():
            while self._ending:
                self._end(self._ending.popleft())

    def _take(self) -> bool:
        with self._lock:
            taken = [run for run in self._runs if run.is_over]
            if taken:
                self._runs = [run for run in self._runs if run not in taken]
                self._ending.extend(taken)
        return bool(taken)

    def _end(self, run: NodeRun) -> None:
        """The framework hears of a failure first, then other nodes of the step: their errors would hide it."""
        if run.is_abandoned:
            run.context.report()
        elif (error := run.end()) is not None:
            if run.step is not None and needs_settlement(error):
                self._settle(run, error)
                return
            run.context.report(error)
            run.give_back()
            self._record(run.step)
            run.leave()
            self._end_aside(run.step)
            return
        run.give_back()
        run.leave()

    def _settle(self, cause: NodeRun, error: Exception) -> None:
        step = cause.step
        with self._lock:
            self._record(step)
            others = [run for run in (*self._ending, *self._runs) if run.step == step] + self._take_aside(step)
            self._runs = [run for run in self._runs if run.step != step]
            self._ending = deque(run for run in self._ending if run.step != step)
            stragglers = partial(self._await_submissions, step)
            settlement = self._settlements[step] = Settlement(
                cause, error, others, stragglers, partial(self._settled, step)
            )
        settlement.start()

    def _await_submissions(self, step: Step, seconds: float) -> None:
        """Wait until no thread submits works of a run of ``step``, which has failed, so none begins to."""
        with self._submitted:
            self._submitted.wait_for(lambda: all(run.step != step for run in self._submitting), seconds)

    def _settled(self, step: Step) -> None:
        with self._lock:
            self._settlements.pop(step, None)

    def _break(self, error: Exception) -> None:
        """Fail all runs; the next one starts another thread."""
        with self._lock:
            runs = [*self._ending, *self._runs]
            self._ending.clear()
            self._runs, self._thread = [], None
        for run in runs:
            run.cut_off(error)
            run.give_back()
            self.give_up(run.step)
            run.leave()

    def forget(self) -> None:
        """In a forked child: the thread and the runs are the parent's. Takes no lock."""
        self.__init__()  # type: ignore[misc]


def _cancel(run: NodeRun) -> None:
    """End ``run``, which has no works, after the node of its step that has failed."""
    run.context.report()
    run.give_back()
    run.leave()


completer = Completer()
os.register_at_fork(after_in_child=completer.forget)
