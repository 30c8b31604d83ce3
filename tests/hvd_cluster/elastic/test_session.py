"""A process in an elastic job, without one."""

from contextlib import suppress
from types import SimpleNamespace

import pytest

from collectives.api import NotInitializedError, ShutDownError
from executors.failures import kind_of_error
from hvd_cluster.core import basics
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.elastic import session


@pytest.fixture
def rank(monkeypatch):
    def be(number):
        monkeypatch.setattr(basics, "rank", lambda: number)

    return be


def test_ranks_that_the_others_have_left_behind_leave_the_job(rank, monkeypatch):
    rank(1)
    told = []
    monkeypatch.setattr(basics, "worlds", lambda: SimpleNamespace(tell_behind=lambda: told.append("behind")))
    with pytest.raises(
        ShutDownError, match=r"rank 1 is in call 1 of elastic functions, but other ranks .* call 2"
    ) as e:
        session._check_call([2, 1])
    assert kind_of_error(e.value).is_consequence  # the job goes on without it
    assert told == ["behind"]


@pytest.mark.parametrize("calls", [[2, 1], [2, 2]])
def test_ranks_that_are_in_the_latest_call_go_on(rank, calls):
    rank(0)
    session._check_call(calls)


@pytest.mark.parametrize(("number", "told"), [(0, ["returned"]), (1, [])])
def test_rank_0_tells_that_the_function_has_returned(rank, monkeypatch, number, told):
    rank(number)
    heard = []
    monkeypatch.setattr(basics, "worlds", lambda: SimpleNamespace(tell_returned=lambda: heard.append("returned")))
    session.returned()
    assert heard == told


@pytest.mark.parametrize("error", [None, ValueError("bad batch"), SystemExit(0)])
def test_a_function_ends_when_the_driver_has_heard_all(monkeypatch, error):
    heard = []
    worlds = SimpleNamespace(
        forget_exception=lambda: heard.append("begins"),
        tell_exception=heard.append,
        await_reports=lambda: heard.append("all"),
    )
    monkeypatch.setattr(basics, "worlds", lambda: worlds)
    with suppress(ValueError, SystemExit), session.telling_of_errors():
        if error is not None:
            raise error
    assert heard == ["begins", *(["ValueError: bad batch"] if isinstance(error, ValueError) else []), "all"]


def test_a_function_may_call_shutdown(monkeypatch):
    def rank():
        raise NotInitializedError("init() was not called")

    monkeypatch.setattr(basics, "rank", rank)
    monkeypatch.setattr(basics, "worlds", SimpleNamespace)
    session.returned()


@pytest.mark.parametrize(
    ("is_alone", "is_over", "end"),
    [(True, True, SystemExit), (False, True, ShutDownError), (True, False, ShutDownError)],
)
def test_a_newcomer_to_a_job_that_is_over_ends_without_an_error(monkeypatch, is_alone, is_over, end):
    def begin_call():
        raise ShutDownError("the job is over: all is done")

    ended = []
    worlds = SimpleNamespace(is_alone=is_alone, is_over=is_over, begin_call=begin_call)
    monkeypatch.setattr(basics, "worlds", lambda: worlds)
    monkeypatch.setattr(basics, "shutdown", lambda: ended.append("shutdown"))
    with pytest.raises(end) as error:
        session.begin_call()
    assert getattr(error.value, "code", 0) == 0
    assert ended == ["shutdown"] * (is_alone and is_over)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_process_that_enters_tells_of_its_end_and_only_a_newcomer_computes_the_layout_of_its_state(
    monkeypatch, is_alone
):
    computed, joined, heard = [], [], []
    worlds = SimpleNamespace(is_alone=is_alone, join=joined.append)
    monkeypatch.setattr(basics, "worlds", lambda: worlds)
    monkeypatch.setattr(session, "heed_notice", lambda _: None)
    monkeypatch.setattr(session, "tell_of_uncaught", heard.append)
    monkeypatch.setattr(session, "_go_to", lambda find, resets: find())
    session.enter(lambda: computed.append("abc") or "abc", resets=False)
    assert computed == joined == (["abc"] if is_alone else [])
    assert heard == [worlds]


@pytest.mark.parametrize(("number", "sent"), [(0, [(0, 1)]), (1, [])])
def test_the_ranks_register_the_process_sets_of_rank_0_which_alone_sends_them(rank, monkeypatch, number, sent):
    rank(number)
    own, told, renewed = ProcessSet([0, 1]), [], []
    monkeypatch.setattr(basics, "worlds", lambda: SimpleNamespace(call=2))
    monkeypatch.setattr(basics, "size", lambda: 3)
    monkeypatch.setattr(basics, "wanted_sets", lambda: [own])
    monkeypatch.setattr(basics, "renew_process_set", renewed.append)
    monkeypatch.setattr(
        session,
        "allgather_object",
        lambda value, _: told.append(value) or [([(0, 1)], 2, False, True), ([], 1, True, False)],
    )
    assert session._agree(resets=False, skips_sync=True) == [(2, False, True), (1, True, False)]
    assert told == [(sent, 2, False, True)]
    assert renewed == [own]


@pytest.mark.parametrize("other_skips", [True, False])
@pytest.mark.parametrize("own_skips", [True, False])
def test_ranks_skip_the_sync_only_together(monkeypatch, own_skips, other_skips):
    """A rank that was cut off in the last step of a world, where others have made it, needs a sync with them."""
    worlds = SimpleNamespace(planned=lambda: "world 1", came_together=lambda left: left == 0, round=0, call=1)
    monkeypatch.setattr(basics, "worlds", lambda: worlds)
    monkeypatch.setattr(basics, "change_world", lambda world: None)
    monkeypatch.setattr(basics, "rank", lambda: 1)
    monkeypatch.setattr(basics, "size", lambda: 2)
    monkeypatch.setattr(session, "allgather_object", lambda told, name: [(*told[:3], other_skips), told])
    assert session.change_as_planned(False, own_skips).skips_sync == (own_skips and other_skips)
