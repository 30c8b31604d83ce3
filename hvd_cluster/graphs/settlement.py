"""The end of a step in which the ranks disagree about a tensor, or in which one refuses a call for its arguments.

All members of the tensor's process set see that, and each may have begun other operations that the others will never
begin. If one rank ran the graph again at once, an operation of its next step might meet one of this step on another
rank. So each rank abandons what it has begun, and then waits in a barrier, before the framework raises the error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from collectives import (
    DuplicateNameError,
    Engine,
    HorovodInternalError,
    InvalidRequestError,
    MismatchError,
    Operation,
    Request,
)
from hvd_cluster.graphs.run import NodeRun
from hvd_cluster.ops.submission import label_of

SECONDS = 5.0
"""How long a rank waits for the others. One that has made the call outside of a graph does not come."""
NAME = "graph.disagreement"


def needs_settlement(error: Exception) -> bool:
    """Whether the other members of a process set have an error, too, because of this one."""
    is_refusal = isinstance(error, InvalidRequestError) and not isinstance(error, DuplicateNameError)
    return isinstance(error, MismatchError) or (is_refusal and getattr(error, "reported", False))


class Settlement:
    """Ends ``cause`` with ``error``, and then ``others`` of its step; calls ``over`` in between.

    ``stragglers`` waits, for so many seconds at most, until the runs of the step have come whose threads submit works
    just now: an operation that is submitted later would be in flight after the settlement.

    Owns the daemon thread "hvd-graph-settlement", which ends with the runs.
    """

    def __init__(
        self,
        cause: NodeRun,
        error: Exception,
        others: list[NodeRun],
        stragglers: Callable[[float], None],
        over: Callable[[], None],
    ) -> None:
        self._cause = cause
        self._error = error
        self._others = others
        self._stragglers = stragglers
        self._over = over
        # Bounds of its waits: that of an abandoned work, and SECONDS, twice. An end of the engine ends both.
        self._thread = threading.Thread(target=self._run, name="hvd-graph-settlement", daemon=True)

    def start(self) -> None:
        """Begin."""
        try:
            self._thread.start()
        except RuntimeError:  # there are too many, or the interpreter ends
            self._run()

    def add(self, run: NodeRun) -> None:
        """One more of the step. Not after the call of ``over``."""
        self._others.append(run)

    def _run(self) -> None:
        try:
            self._stragglers(SECONDS)
            self._let_end()
            _meet(self._cause.engine, self._cause.kernel.process_set.process_set_id or 0)
        finally:
            self._cause.context.report(self._error)
            self._cause.give_back()
            self._over()
            self._cause.leave()
            self._let_end()
            for run in self._others:
                run.context.report()
                run.give_back()
                run.leave()

    def _let_end(self) -> None:
        """Wait until nothing of the step is in flight on this rank."""
        others = list(self._others)  # more may come meanwhile, which are not abandoned yet
        for run in others:
            run.abandon()
        for work in [work for run in others for work in run.works]:
            with suppress(HorovodInternalError):
                self._cause.engine.synchronize(work)


def _meet(engine: Engine, process_set: int) -> None:
    """Wait until all members of the set are here."""
    request = Request(label_of(Operation.BARRIER, NAME), Operation.BARRIER, process_set=process_set)
    with suppress(HorovodInternalError, InvalidRequestError):  # another step of this rank waits there
        work = engine.submit(request, None, None)
        timer = threading.Timer(SECONDS, engine.abandon, ([work],))
        timer.daemon = True
        timer.start()
        try:
            engine.synchronize(work)
        finally:
            timer.cancel()
