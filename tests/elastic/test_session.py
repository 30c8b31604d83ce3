"""A process in an elastic job, without one."""

from types import SimpleNamespace

import pytest

from collectives.api import ShutDownError
from executors.failure import kind_of_error
from hvd_cluster import basics
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
