"""What a process of an elastic job tells its driver when a world has formed, without a job."""

import pytest

from collectives.api import HorovodInternalError, ShutDownError
from hvd_cluster.core import basics
from hvd_cluster.elastic import loop, session
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

    def formed(self):
        self.has_formed = True


@pytest.fixture
def worlds(monkeypatch):
    found = Worlds()
    monkeypatch.setattr(basics, "worlds", lambda: found)
    monkeypatch.setattr(basics, "rank", lambda: 0)
    monkeypatch.setattr(session, "barrier", lambda: None)
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


def test_rank_0_does_not_tell_while_another_rank_may_lack_the_state(worlds, monkeypatch):
    """The driver would take that rank for one that can go on alone."""
    monkeypatch.setattr(session, "barrier", lambda: _raise(HorovodInternalError("lost rank 1")))
    with pytest.raises(HorovodInternalError, match="lost rank 1"):
        loop._Run(Trained())._begin()
    assert worlds.reports == []


def test_a_sync_keeps_the_layout_that_it_has_compared(worlds, monkeypatch):
    monkeypatch.setattr(elastic_state, "allgather_object", lambda value, name: [value, value])
    state = ObjectState(epoch=0)
    assert state.agreed_layout == ""
    state._reports(is_settled=False)
    assert state.agreed_layout == state.layout_digest()


class TestKeepingState:
    """Where Ray Train replaces lost workers."""

    @pytest.fixture
    def calls(self, worlds, monkeypatch):
        """What the loop does; a rank is lost after the last collective of the first call of the function."""

        def change(text):
            calls.append(text)
            return session.Change(resets=False)

        calls, losses = [], [HorovodInternalError("lost rank 1")]
        monkeypatch.setattr(basics, "is_cut_off", lambda: bool(losses))
        monkeypatch.setattr(session, "allgather_object", lambda value, name: _raise(losses.pop()))
        monkeypatch.setattr(session, "begin_call", lambda: False)
        monkeypatch.setattr(session, "enter", lambda layout, resets: None)
        monkeypatch.setattr(session, "returned", lambda: calls.append("returned"))
        monkeypatch.setattr(session, "change_after", lambda error, resets: change(str(error)))
        monkeypatch.setattr(session, "come_back", lambda round, resets: change(f"back in {round}"))
        return calls

    def test_a_function_that_returns_after_a_loss_is_called_again(self, calls):
        with loop.keeping_state():
            loop._Run(Trained()).call(lambda: calls.append("called"))
        assert calls == ["called", "lost rank 1", "called", "returned"]

    def test_not_in_other_jobs(self, calls):
        loop._Run(Trained()).call(lambda: calls.append("called"))
        assert calls == ["called", "returned"]

    def test_not_after_the_end_of_another_rank_that_has_finished(self, calls, monkeypatch):
        monkeypatch.setattr(session, "allgather_object", lambda value, name: _raise(ShutDownError("rank 1 has ended")))
        with loop.keeping_state():
            loop._Run(Trained()).call(lambda: calls.append("called"))
        assert calls == ["called", "returned"]

    def test_the_state_of_the_last_function_is_given_to_successors(self, calls, worlds):
        state = Trained()
        state.on_reset = lambda: calls.append("reset")
        with loop.keeping_state():
            loop._kept.keep(loop._Run(state))
            loop.hand_over(7)
        assert calls == ["back in 7", "reset"]
        assert [report.kind for report in worlds.reports] == ["formed"]
        assert loop._kept.run is None


def _raise(error):
    raise error
