"""What a process of an elastic job tells its driver when a world has formed, without a job."""

import pytest

from hvd_cluster import basics
from hvd_cluster.elastic import loop
from hvd_cluster.elastic import state as elastic_state
from hvd_cluster.elastic.state import ObjectState, State


class Trained(ObjectState):
    """The digest of its layout takes long."""

    def __init__(self):
        super().__init__(epoch=0)
        self.digests = 0

    def sync(self):
        self.agreed_layout = "of the sync"

    def layout_digest(self):
        self.digests += 1
        return "of now"


class Own(State):
    def __init__(self):
        super().__init__(None, None)

    def sync(self):
        return


class Worlds:
    round = call = 3

    def __init__(self):
        self.reports = []

    def report_later(self, report):
        self.reports.append(report)


@pytest.fixture
def worlds(monkeypatch):
    found = Worlds()
    monkeypatch.setattr(basics, "worlds", lambda: found)
    monkeypatch.setattr(basics, "rank", lambda: 0)
    return found


@pytest.mark.parametrize(
    ("state", "skip_sync", "layout", "digests"),
    [(Trained, False, "of the sync", 0), (Trained, True, "of now", 1), (Own, False, "", 0), (Own, True, "", 0)],
)
def test_rank_0_tells_the_layout_and_computes_it_only_without_a_sync(worlds, state, skip_sync, layout, digests):
    run = loop._Run(state())
    run._skip_sync = skip_sync
    run._begin()
    assert [report.layout for report in worlds.reports] == [layout]
    assert getattr(run._state, "digests", 0) == digests


@pytest.mark.parametrize(("rank", "is_elastic"), [(1, True), (0, False)])
def test_nobody_else_computes_it(worlds, monkeypatch, rank, is_elastic):
    monkeypatch.setattr(basics, "rank", lambda: rank)
    monkeypatch.setattr(basics, "worlds", lambda: worlds if is_elastic else None)
    run = loop._Run(Trained())
    run._skip_sync = True
    run._begin()
    assert (run._state.digests, worlds.reports) == (0, [])


def test_a_sync_keeps_the_layout_that_it_has_compared(worlds, monkeypatch):
    monkeypatch.setattr(elastic_state, "allgather_object", lambda value, name: [value, value])
    state = ObjectState(epoch=0)
    assert state.agreed_layout == ""
    state._reports(is_settled=False)
    assert state.agreed_layout == state.layout_digest()
