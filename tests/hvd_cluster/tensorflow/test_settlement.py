"""The end of a run in which the ranks disagree, on an engine that is not real."""

import threading
from types import SimpleNamespace

from collectives.api import InvalidRequestError
from hvd_cluster.graphs.run import NodeRun
from hvd_cluster.graphs.settlement import Settlement

SECONDS = 20.0


class FakeEngine:
    """``awaited`` has the works that were waited for before they were abandoned."""

    def __init__(self):
        self.abandoned = []
        self.awaited = []

    def abandon(self, works):
        self.abandoned += works

    def synchronize(self, work):
        if work not in self.abandoned:
            self.awaited.append(work)

    def submit(self, *arguments):
        raise InvalidRequestError("nobody meets here")


class OpenRun:
    """A run of which another thread submits the next one while the settlement looks at its works."""

    def __init__(self, run, come):
        self.abandon, self.context, self.give_back, self.leave = run.abandon, run.context, run.give_back, run.leave
        self._works, self._come = run.works, come

    @property
    def works(self):
        self._come()
        return self._works


def run_of(engine, work):
    kernel = SimpleNamespace(process_set=SimpleNamespace(process_set_id=0))
    context = SimpleNamespace(report=lambda error=None: None)
    ended = threading.Event()
    return NodeRun(kernel, context, engine, [work], ended.set, lambda: None, 1), ended


def ignore(seconds):
    """No other thread submits."""


def test_nobody_waits_for_a_run_that_came_late_before_it_is_abandoned():
    """Other ranks may never submit its works."""
    engine, come = FakeEngine(), []
    runs = [run_of(engine, work) for work in ("cause", "second", "late")]
    (cause, _), (second, _), (late, _) = runs

    def add():
        if not come:
            come.append(late)
            settlement.add(late)

    settlement = Settlement(cause, ValueError("a disagreement"), [OpenRun(second, add)], ignore, lambda: None)
    settlement.start()
    assert all(ended.wait(SECONDS) for _, ended in runs)
    assert come == [late]
    assert set(engine.abandoned) == {"second", "late"}
    assert not engine.awaited
