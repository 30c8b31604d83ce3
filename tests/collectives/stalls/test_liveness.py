"""Which ranks are silent, when that is known, and which rank the error of a job names."""

import itertools

import pytest

from collectives.api import CollectiveTimeoutError, PeerLostError
from collectives.stalls.liveness import GRACE_SECONDS, MOMENT_SECONDS, LivenessCheck, Result, verdict

LATE = CollectiveTimeoutError("rank 2 did not come", [2])
BROKEN = PeerLostError("the connection to rank 2 is gone", [2])
HOSTS = ("a", "a", "b", "b")
SOON, MOMENT, GRACE = 10.0 + MOMENT_SECONDS / 2, 10.0 + MOMENT_SECONDS, 10.0 + GRACE_SECONDS


@pytest.fixture
def call():
    """Rank 0 of four ranks."""
    return LivenessCheck(range(1, 4))


def answer(call, *ranks, now=10.0):
    for rank in ranks:
        call.answered(rank, now)


def test_an_inquiry_asks_all_others_and_names_the_silent_ranks_after_the_grace(call):
    assert call.inquire(3, 10.0) == [1, 2, 3]
    answer(call, 1, 3)
    assert call.deadline == GRACE
    assert call.settle(SOON) is None
    assert call.settle(GRACE) == Result((2,), GRACE_SECONDS, (3,), None)
    assert not call
    assert call.deadline is None
    assert call.settle(99.0) is None


def test_an_inquiry_is_answered_at_once_when_all_ranks_run(call):
    call.inquire(3, 10.0)
    answer(call, 1, 2, 3)
    assert call.settle(SOON) == Result((), 0.0, (3,), None)


def test_all_ranks_that_inquire_get_one_result(call):
    assert call.inquire(3, 10.0) == [1, 2, 3]
    answer(call, 1)
    assert call.inquire(0, 10.5) == [1]
    answer(call, 1, 3)
    assert call.settle(GRACE) == Result((2,), GRACE_SECONDS, (0, 3), None)


def test_a_rank_that_is_silent_is_asked_once_until_it_answers(call):
    call.inquire(1, 10.0)
    answer(call, 1, 3)
    call.settle(GRACE)
    assert call.inquire(1, 20.0) == [1, 3]
    answer(call, 1, 3)
    assert call.settle(20.0) == Result((2,), 10.0, (1,), None)
    answer(call, 2)
    assert call.inquire(1, 30.0) == [1, 2, 3]


def test_an_accusation_names_a_rank_that_was_silent_before_and_no_rank_that_has_not_had_time_to_answer(call):
    call.inquire(1, 10.0)
    answer(call, 1, 3)
    call.settle(GRACE)
    call.accuse(LATE, 14.0)
    assert call.deadline <= 14.0
    assert call.settle(14.0) == Result((2,), 4.0, (), LATE)


def test_an_accusation_waits_for_the_grace_where_no_rank_was_silent_before(call):
    call.accuse(LATE, 10.0)
    answer(call, 1, 3)
    assert call.deadline == GRACE
    assert call.settle(MOMENT) is None
    assert call.settle(GRACE) == Result((2,), GRACE_SECONDS, (), LATE)


def test_an_accusation_of_ranks_that_all_run_leaves_them_a_moment_to_explain(call):
    call.accuse(BROKEN, 10.0)
    answer(call, 1, 2, 3)
    assert call.settle(SOON) is None
    assert call.deadline == MOMENT
    assert call.settle(MOMENT) == Result((), 0.0, (), BROKEN)


def test_a_rank_that_answers_late_has_a_moment_to_explain_too(call):
    """It answers first if its error comes between two of its steps."""
    call.accuse(BROKEN, 10.0)
    answer(call, 1, 2)
    answer(call, 3, now=10.5)
    assert call.settle(10.5) is None
    assert call.deadline == 10.5 + MOMENT_SECONDS
    assert call.settle(10.5 + MOMENT_SECONDS) == Result((), 0.0, (), BROKEN)


def test_answers_to_later_questions_do_not_put_the_verdict_off(call):
    call.accuse(BROKEN, 10.0)
    answer(call, 1, 2, 3)
    assert call.inquire(1, SOON) == [1, 2, 3]
    answer(call, 1, 2, 3, now=SOON)
    assert call.settle(MOMENT) == Result((), 0.0, (1,), BROKEN)


def test_the_first_accusation_counts(call):
    call.accuse(LATE, 10.0)
    call.accuse(BROKEN, 10.01)
    answer(call, 1, 2, 3)
    assert call.settle(MOMENT).accusation is LATE


@pytest.mark.parametrize("stopped", [(1,), (2,), (3,), (1, 3), (1, 2, 3)])
@pytest.mark.parametrize("accuser", [0, 1, 2, 3])
def test_every_set_of_stopped_ranks_is_named_whoever_accuses_whomever(stopped, accuser):
    """An error names any rank that the accuser waits for; the stopped ranks alone do not answer, in any order."""
    if accuser in stopped:
        pytest.skip("a stopped rank accuses nobody")
    running = [rank for rank in (1, 2, 3) if rank not in stopped]
    for blamed, order in itertools.product(range(4), itertools.permutations(running)):
        call = LivenessCheck(range(1, 4))
        call.accuse(CollectiveTimeoutError(f"rank {blamed}", [blamed]), 10.0)
        answer(call, *order)
        result = call.settle(GRACE)
        error = verdict(result.accusation, result.silent, result.seconds, HOSTS, "LIMIT")
        assert error.ranks == stopped


@pytest.mark.parametrize("error", [LATE, BROKEN])
def test_a_verdict_on_silent_ranks_says_what_is_known_and_gives_no_advice_about_time(error):
    found = verdict(error, (1, 3), 1.04, HOSTS, "LIMIT")
    assert isinstance(found, CollectiveTimeoutError)
    assert found.ranks == (1, 3)
    assert str(found).startswith(
        "rank 1 on host 'a' and rank 3 on host 'b': no answer for 1.0 s. The process is stopped"
    )
    assert str(error) in str(found)
    assert "LIMIT" not in str(found)


def test_a_verdict_where_every_rank_runs_names_the_limit():
    found = verdict(LATE, (), 0.0, HOSTS, "LIMIT")
    assert found.ranks == (2,)
    assert "Every rank runs" in str(found)
    assert "Raise LIMIT if a rank may be that slow" in str(found)
    assert verdict(BROKEN, (), 0.0, HOSTS, "LIMIT") is BROKEN
