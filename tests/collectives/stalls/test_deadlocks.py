"""Ranks that wait for each other in different calls."""

import threading
import time
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.api import MismatchError, Operation
from collectives.controller.waits import Activity, CallInFlight, RankStatus, Waiting
from collectives.stalls.deadlocks import SAME_CALLS, SAME_OPTIMIZERS, deadlock, suspects
from tests.collectives.engine.job import PATIENCE, Caller, ones, outcome, run, running, submit, total, until, wait


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Rank 0 asks, and decides, early."""
    monkeypatch.setattr("collectives.stalls.deadlocks.PATIENCE_SECONDS", 0.02)


def assert_standstill(errors, names, of="", remedy=SAME_CALLS):
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, MismatchError)
        assert error.property == "call"
        assert error.values == {rank: f"{name!r}{of}" for rank, name in enumerate(names)}
        assert str(error).endswith(f"; {remedy}")


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", "b", "a"), ("a", "b", "c"), ("b", "a", "c", "a")])
@pytest.mark.parametrize("steps", [0, 10])  # later ones bypass the coordinator
@pytest.mark.usefixtures("transport")
def test_calls_of_different_names_fail_on_all_ranks_and_may_be_repeated(names, steps):
    def body(engine):
        for _ in range(steps):
            run(engine, ones(engine), "a")
        error = outcome(lambda: run(engine, ones(engine), names[engine.topology.rank]))
        return error, [run(engine, ones(engine), name)[0] for name in ("a", "b", "c")]

    with running(len(names)) as job:
        errors, sums = zip(*job.run(body), strict=True)
    assert_standstill(errors, names)
    assert sums == ([total(len(names))[0]] * 3,) * len(names)


def test_ranks_on_several_hosts():
    names = ("a", "b", "b", "a")
    with running(4, on_hosts=True) as job:
        assert_standstill(
            job.run(lambda engine: outcome(lambda: run(engine, ones(engine), names[engine.topology.rank]))), names
        )


def test_other_operations_and_other_tensors_in_flight():
    """A tensor that nobody waits for stays in flight; the ranks may still combine it."""

    def body(engine):
        rank = engine.topology.rank
        kept = submit(engine, ones(engine), "kept") if rank else None
        call = partial(run, engine, ones(engine), f"call.{rank}", (Operation.ALLREDUCE, Operation.ALLGATHER)[rank])
        error = outcome(call)
        return error, wait(engine, kept or submit(engine, ones(engine), "kept"))[0]

    with running(2) as job:
        errors, sums = zip(*job.run(body), strict=True)
    assert_standstill(errors, ("call.0", "call.1"))
    assert sums == (3.0, 3.0)


def test_ranks_of_a_set_stand_still_while_others_train():
    def body(engine):
        rank = engine.topology.rank
        if rank < 2:
            return outcome(lambda: run(engine, ones(engine), f"own.{rank}", process_set=1))
        return [run(engine, ones(engine), "step", process_set=2)[0] for _ in range(50)]

    with running(4, sets=[(0, 1), (2, 3)]) as job:
        *errors, first, second = job.run(body)
    assert_standstill(errors, ("own.0", "own.1"), " on process set 1")
    assert first == second == [7.0] * 50


@pytest.mark.usefixtures("transport")
def test_a_rank_whose_other_thread_may_still_come_is_waited_for():
    """It has never called a collective, and runs code of the user."""
    come = threading.Event()

    def late(engine):
        while not come.is_set():
            time.sleep(0.01)  # in no call that waits for another thread
        return run(engine, ones(engine), f"call.{1 - engine.topology.rank}")

    with running(2) as job:
        others = [Caller(engine, body=late) for engine in job.engines]
        callers = [Caller(engine, f"call.{engine.topology.rank}") for engine in job.engines]
        statuses = job.engines[0]._parts.statuses
        for _ in range(2):
            heard = [statuses._answers.get(rank) for rank in range(2)]
            until(lambda: all(statuses._answers.get(rank) not in (None, heard[rank]) for rank in range(2)))  # noqa: B023
        come.set()
        assert [caller.result()[0] for caller in (*callers, *others)] == [3.0] * 4


LONG = 1.0
"""Seconds of an operation in which a rank is: longer than rank 0 takes to ask, and to judge."""


@pytest.mark.parametrize("first", ["k", "l"])
def test_a_rank_inside_an_operation_whose_call_has_yet_to_leave(first):
    """Rank 3 is late inside of an operation with rank 1, which answers meanwhile, and submits k after that."""
    with running(4, over_tcp=True, sets=[(1, 3), (0, 1, 2)]) as job:
        entered, heard = threading.Event(), partial(heard_by, job.engines[0])

        def rank_0(engine):
            late = submit(engine, ones(engine), "l", process_set=2)
            engine.poll(late)
            return run(engine, ones(engine), "k", process_set=2)[0], wait(engine, late)[0]

        def rank_1(engine):
            late = submit(engine, ones(engine), "l", process_set=2)
            until(lambda: 1 in heard((2, "l")))
            entered.wait(PATIENCE)
            inside = submit(engine, ones(engine), "x", process_set=1)
            until(lambda: engine._works.running)
            soon = submit(engine, ones(engine), "k", process_set=2)
            works = (soon, late) if first == "k" else (late, soon)
            return *(wait(engine, work)[0] for work in works), wait(engine, inside)[0]

        def rank_2(engine):
            return [run(engine, ones(engine), name, process_set=2)[0] for name in ("k", "l")]

        def rank_3(engine):
            inside = submit(engine, ones(engine), "x", process_set=1)
            until(lambda: 3 in heard((1, "x")))
            engine._queue.call(lambda: threading.Event().wait(LONG))
            engine._queue.notify()
            entered.set()
            return wait(engine, inside)[0]

        bodies = (rank_0, rank_1, rank_2, rank_3)
        callers = [Caller(engine, body=body) for engine, body in zip(job.engines, bodies, strict=True)]
        results = [caller.result() for caller in callers]
    assert results == [(6.0, 6.0), (6.0, 6.0, 6.0), [6.0, 6.0], 6.0]


def heard_by(engine, key):
    """The ranks of whose submission of ``key`` rank 0 has heard."""
    pending = engine._parts.link._coordinator._pending.get(key)
    return set() if pending is None else pending.submitted()


# Pure.


def tensor(*submitted, of=2):
    return Waiting(0.0, tuple(rank for rank in range(of) if rank not in submitted), submitted)


def answer(rank, *names, is_held=True):
    return RankStatus(rank, Activity.WAITS, waits=tuple(CallInFlight(name, 0, 1.0) for name in names), is_held=is_held)


def pending(**tensors):
    return {(0, name): waiting for name, waiting in tensors.items()}


def test_a_standstill_is_certain_when_no_rank_of_it_can_go_on():
    both = pending(a=tensor(0), b=tensor(1))
    assert suspects(both) == {0, 1}
    assert deadlock(both, [answer(0, "a"), answer(1, "b")]).keys == ((0, "a"), (0, "b"))
    assert deadlock(both, [answer(0, "a")]) is None, "rank 1 has not answered"
    assert deadlock(both, [answer(0, "a"), answer(1, "b", is_held=False)]) is None
    assert deadlock(both, [answer(0, "a"), answer(1)]) is None, "rank 1 waits for nothing"
    assert deadlock(both, [answer(0, "a"), answer(1, "b", "c")]) is None, "c may have come already"


def test_a_rank_that_waits_for_a_call_of_which_rank_0_has_not_heard():
    """Its answer has come before that call."""
    assert deadlock(pending(a=tensor(0), b=tensor(1)), [answer(0, "a"), answer(1, "b", "a")]) is None
    assert deadlock(pending(a=tensor(0)), [answer(0, "a"), answer(1, "a")]) is None


def test_a_rank_outside_may_still_come():
    three = pending(a=tensor(0, of=3), b=tensor(1, of=3))
    assert suspects(three) == set()
    assert deadlock(three, [answer(0, "a"), answer(1, "b")]) is None
    third = three | pending(c=tensor(2, of=3))
    assert deadlock(third, [answer(0, "a"), answer(1, "b"), answer(2, "c", is_held=False)]) is None
    assert len(deadlock(third, [answer(0, "a"), answer(1, "b"), answer(2, "c")]).keys) == 3


def test_a_slow_rank_is_no_suspect():
    assert suspects(pending(a=tensor(0, 2, of=3), b=tensor(0, of=3))) == set()


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (("allreduce.loss", "barrier.x"), SAME_CALLS),
        (("allgather.optimizer.models", "allreduce.gradients.a..b"), SAME_OPTIMIZERS),
        (("allreduce.optimizer.gradients.a..b", "allreduce.loss"), SAME_CALLS),
    ],
)
def test_the_remedy_follows_from_the_calls(names, remedy):
    found = deadlock({(0, name): tensor(rank) for rank, name in enumerate(names)}, map(answer, (0, 1), names))
    assert found.why.text.startswith(
        "the ranks wait for each other in different calls, and none of them can go on: "
        f"{names[0]!r} on rank 0; {names[1]!r} on rank 1; "
    )
    assert found.why.text.endswith(remedy)


def test_long_lists_of_calls_are_cut():
    names = [f"call.{number}" for number in range(9)]
    found = deadlock(
        {(0, each): tensor(0) for each in names} | pending(z=tensor(1)), [answer(0, *names), answer(1, "z")]
    )
    assert "'call.5' and 3 more on rank 0; 'z' on rank 1" in found.why.text


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=2, max_size=4))
def test_ranks_stand_still_exactly_if_no_order_of_ends_frees_them(waits):
    """Against a simulation: each rank has called only what it waits for; a call that all have made frees its ranks."""
    size = len(waits)
    tensors = {call: tensor(*(rank for rank in range(size) if call in waits[rank]), of=size) for call in range(5)}
    half = {(0, str(call)): waiting for call, waiting in tensors.items() if waiting.missing and waiting.submitted}
    can_end = {call for call, waiting in tensors.items() if not waiting.missing}
    found = deadlock(half, [answer(rank, *map(str, calls)) for rank, calls in enumerate(waits)])
    moving = {rank for rank in range(size) if can_end & set(waits[rank])}
    while True:  # a rank that goes on may make any call
        more = {rank for rank in range(size) if any(moving & set(tensors[call].missing) for call in waits[rank])}
        if more <= moving:
            break
        moving |= more
    stuck = set() if found is None else {int(rank) for rank, _ in found.why.values}
    assert stuck == set(range(size)) - moving
