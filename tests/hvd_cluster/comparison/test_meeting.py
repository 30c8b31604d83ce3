"""Ranks meet before they combine the gradients of a model for the first time."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from collectives.api import InvalidRequestError, MismatchError
from hvd_cluster.comparison import meeting
from hvd_cluster.comparison.meeting import agreed_names, refusing_list, require_same
from hvd_cluster.comparison.models import Entry, Model
from hvd_cluster.comparison.rosters import Roster, static_name
from hvd_cluster.core import basics
from tests.collectives.engine.job import outcome
from tests.hvd_cluster.comparison.variables import Variable


def model(*names):
    return Model(tuple(Entry(name, (3,), "float32") for name in names))


A, B, RENAMED = model("a"), model("b", "c"), model("x/b", "x/c")


def meet(rank, chosen, known=(A, B)):
    return agreed_names(chosen, lambda: known, rank.process_set)


def test_ranks_exchange_their_models_once(on_ranks):
    def body(rank):
        found = [meet(rank, each).names for each in (A, B, A)]
        before = rank.engine.batches
        meet(rank, B)
        return found, rank.engine.batches - before

    assert on_ranks(2, body) == [([A.names, B.names, A.names], 0)] * 2


def test_the_names_of_the_first_rank_hold_for_all(on_ranks):
    def body(rank):
        own = RENAMED if rank.number else B
        return [meet(rank, own, (own,)).names for _ in range(2)]

    assert on_ranks(3, body) == [[B.names] * 2] * 3


def test_ranks_that_differ_get_one_error_each_time(on_ranks):
    def body(rank):
        own = A if rank.number else B
        errors = [outcome(lambda: meet(rank, own, (own,))) for _ in range(2)]
        return errors, meet(rank, A, (own,)).names

    for errors, names in on_ranks(3, body):
        assert [type(error) for error in errors] == [MismatchError] * 2
        assert "'b', float32 of shape (3,), is on rank 0 only" in str(errors[0])
        assert names == A.names


def test_ranks_that_use_their_models_in_another_order_get_one_error(on_ranks, monkeypatch):
    monkeypatch.setattr(meeting, "PAUSE_SECONDS", 0.001)

    def body(rank):
        order = (B, A) if rank.number else (A, B)
        error = outcome(lambda: meet(rank, order[0]))
        return error, meet(rank, A).names

    for error, names in on_ranks(2, body):
        assert "different models at the same time: that with 'a' on rank 0, that with 'b' to 'c' on rank 1" in str(
            error
        )
        assert names == A.names


def test_a_list_that_one_rank_refuses(on_ranks, monkeypatch):
    monkeypatch.setattr(basics, "is_initialized", lambda: True)

    def body(rank):
        def call():
            with refusing_list("call", rank.process_set):
                if rank.number == 1:
                    raise InvalidRequestError("no tensors")
            require_same(A, "call", rank.process_set)

        return outcome(call), require_same(B, "call", rank.process_set)

    results = on_ranks(3, body)
    assert [names for _, names in results] == [B.names] * 3
    assert "rank 1 refused the call: no tensors" in str(results[0][0])
    assert isinstance(results[1][0], InvalidRequestError)


def test_a_roster_gives_the_names_of_the_first_rank(on_ranks):
    def body(rank):
        roster = Roster(1, RENAMED if rank.number else B, rank.process_set)
        was_entered = roster.is_entered(rank.engine)
        roster.enter()
        statics = (static_name([1, 0]) + "_1", static_name([1]) + ".slices", "total")
        return was_entered, roster.is_entered(rank.engine), [roster.name_in_flight(each) for each in statics]

    expected = ["gradients.1.c..0.b_1", "gradient.1.c.slices", "total"]
    assert on_ranks(2, body) == [(False, True, expected)] * 2


def twin(stamp):
    return Model((Entry("twin", (3,), "float32"),), stamp=stamp)


def as_thread_of(rank, function):
    """``function`` for another thread of the rank that this thread plays."""
    engine, process_set = rank.engine, rank.process_set

    def call():
        rank.engine, rank.process_set = engine, process_set
        return outcome(function)

    return call


@pytest.mark.parametrize("both_wait", [True, False])
def test_ranks_that_begin_with_another_one_of_two_models_that_are_alike(on_ranks, monkeypatch, both_wait):
    """Where both are about to be used, as by nodes of a graph, the ranks go on."""
    monkeypatch.setattr(meeting, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(meeting, "ROUNDS", 10**9 if both_wait else 2)
    kept = [Variable(path) for path in ("twin_1", "twin_2")]

    def body(rank):
        order = [twin(each.path) for each in (kept[::-1] if rank.number else kept)]
        with ThreadPoolExecutor(2) as pool:
            calls = [as_thread_of(rank, partial(meet, rank, each, order)) for each in order[: 1 + both_wait]]
            return [call.result() for call in list(map(pool.submit, calls))]

    for results in on_ranks(2, body):
        if both_wait:
            assert [each.names for each in results] == [("twin",)] * 2
        else:
            assert "'twin', number 0 of 2 on rank 0, that with 'twin', number 1 of 2 on rank 1" in str(results[0])
