"""Calls that one rank refuses and others do not: every rank hears of it, and the name can be used again."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import (
    CollectiveTimeoutError,
    DType,
    InvalidRequestError,
    MismatchError,
    Operation,
    ReduceOp,
    RefusedCallError,
    Request,
    ShutDownError,
)
from collectives.buffers import as_buffer, empty
from collectives.controller.messages import Leave, Refuse, Stop
from collectives.controller.worker import Worker
from collectives.engine.work import Work
from tests.collectives.controller.hosted_simulation import HostedWorld
from tests.collectives.controller.negotiation_simulation import (
    ALL_REFUSED,
    Script,
    World,
    Wrong,
    outcomes,
    scripts,
    tensor,
)
from tests.collectives.engine.job import ones, outcome, run, running, submit, until, wait

REASON = "its splits are wrong"
WRONG = Wrong(tensor(), REASON)


def group(length, label="g"):
    return [
        Request(f"{label}[{place}]", Operation.ALLREDUCE, DType.FLOAT32, (4,), group=label, group_size=length)
        for place in range(length)
    ]


# The end.


@pytest.mark.parametrize("pending", [False, True])
def test_a_stop_carries_the_calls_that_some_ranks_may_still_make(pending):
    world = World(3)
    if pending:
        world.submit(tensor(), 0)
    world.submit(WRONG, 1)
    world.submit(tensor("b"), 0)
    world.settle()
    world.coordinator.receive(1, Leave(), 0.0)
    world.settle()
    for stop in world.sent(Stop):
        (refuse,) = stop.refused
        assert (refuse.process_set, refuse.name) == (0, "a")
        error = refuse.error()
        assert isinstance(error, RefusedCallError)
        assert error.values == {1: REASON}


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_a_call_that_a_rank_refused_before_it_left_has_its_reason(unnamed, early):
    """The other ranks submit the tensor before the end, or after it."""

    def call(engine, **fields):
        request = Request("x", Operation.ALLREDUCE, DType.FLOAT32, (2,), **fields)
        buffer = as_buffer(np.ones(2, np.float32))
        return engine.submit(request, buffer, buffer, unnamed=unnamed)

    with running(3) as job:
        first, second, third = job.engines
        works = [call(first)] if early else []
        with pytest.raises(InvalidRequestError):
            call(second, prescale_factor=float("nan"))
        second.shutdown()
        if not early:
            until(lambda: first._ends.ending.finished and third._ends.ending.finished)
        errors = [
            outcome(lambda: wait(first, works[0] if early else call(first))),
            outcome(lambda: wait(third, call(third))),
        ]
        for error in errors:
            assert isinstance(error, RefusedCallError), error
            assert "rank 1 refused the call" in str(error)
            assert "scale factor of nan" in error.values[1]
        until(lambda: third._ends.ending.finished)
        other = outcome(lambda: run(third, ones(third), "another"))
        assert isinstance(other, ShutDownError)
        assert "rank 1 refused the call" in str(other)


def test_a_rejection_is_reported_before_its_rank_leaves():
    """Both wait for the communication thread, which may do them in one step."""
    with running(2) as job:
        first, second = job.engines
        work = submit(first, ones(first), "x")
        with second._callers:
            assert isinstance(outcome(lambda: run(second, ones(second), "x", prescale_factor=float("nan"))), ValueError)
            second._ends.leave()
        assert isinstance(outcome(lambda: wait(first, work)), RefusedCallError)


# The coordinator.


@pytest.mark.parametrize("first", [0, 1])
def test_every_member_hears_once_who_refused_the_call_and_why(first):
    world = World(3)
    for rank in (1, 0) if first else (0, 1):
        world.submit(WRONG if rank == 1 else tensor(), rank)
    world.settle()
    assert not world.log
    world.submit(tensor(), 2)
    world.settle()
    (refuse, *_) = world.sent(Refuse)
    assert "tensor 'a': rank 1 refused the call: its splits are wrong" in refuse.text
    assert (refuse.property, refuse.values) == ("arguments", ((1, REASON),))
    assert [len(world.refused(rank)) for rank in range(3)] == [1, 1, 1]
    world.submit(tensor())
    world.settle()
    assert world.ran(0) == world.ran(1) == world.ran(2) == [["a"]]


def test_many_ranks_that_refuse_are_cut_short_in_the_text_alone():
    world = World(8)
    world.submit(tensor(), 0)
    world.submit(WRONG, *range(1, 8))
    world.settle()
    (text,) = world.refused(0)
    assert "rank 4 refused" in text
    assert "rank 5" not in text
    assert "and 3 more" in text


def test_a_call_that_no_rank_submits_holds_nothing_up_and_is_no_stall():
    world = World(2)
    world.submit(WRONG, 1)
    world.settle()
    assert not world.coordinator.is_waiting
    world.submit(tensor("b"))
    world.settle()
    assert world.ran(0) == [["b"]]
    world.submit(WRONG, 0)
    world.settle()
    assert world.refused(0) == world.refused(1) == [ALL_REFUSED]


def test_what_waits_names_the_ranks_that_neither_submitted_nor_refused():
    world = World(3)
    world.submit(WRONG, 1)
    world.submit(tensor(), 0)
    world.settle()
    ((_, waiting),) = world.coordinator.waiting().items()
    assert (waiting.missing, waiting.submitted) == ((2,), (0,))


def test_a_rank_that_has_joined_need_not_come():
    world, join = World(3), Request("join", Operation.JOIN)
    world.submit(WRONG, 1)
    world.submit(join, 2)
    world.submit(tensor(), 0)
    world.settle()
    assert len(world.refused(0)) == len(world.refused(1)) == 1
    world.submit(WRONG, 1)
    world.submit(join, 0)
    world.settle()
    assert world.refused(1)[1:] == [ALL_REFUSED]


def test_the_end_of_a_join_ends_what_was_refused_before():
    world, join = World(2), Request("join", Operation.JOIN)
    world.submit(WRONG, 0)
    world.settle()
    world.submit(join)
    world.settle()
    assert world.log[0][0][0] == "refuse"
    world.submit(tensor())
    world.settle()
    assert world.ran(0) == world.ran(1) == [["join"], ["a"]]


@pytest.mark.parametrize("submitted", [False, True])
def test_a_removed_set_forgets_what_was_refused_on_it(submitted):
    world = World(3, sets=((0, 1),))
    world.submit(Wrong(tensor(process_set=1), REASON), 0)
    if submitted:
        world.submit(tensor(process_set=1), 1)
    remove = Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=1, splits=(0, 1))
    world.submit(remove)
    world.settle()
    assert not world.coordinator._rejections._by_key
    assert not world.coordinator.is_waiting


def test_what_is_refused_on_a_set_that_was_removed_meanwhile():
    world = World(2, sets=((0,),))
    world.submit(Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=1, splits=(0,)))
    world.settle()
    world.submit(Wrong(tensor(process_set=1), REASON), 0)
    world.settle()
    assert world.refused(0) == ["process set 1 has been removed"]


def test_nothing_is_kept_after_a_shutdown():
    world = World(2)
    world.submit(WRONG, 1)
    world.settle()
    world.coordinator.receive(0, Leave(), 0.0)
    assert not world.coordinator._rejections._by_key


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_a_group_that_one_rank_refuses_fails_as_a_whole(cached, first):
    world, requests = World(2), group(3)
    if cached:
        for request in requests:
            world.submit(request)
        world.settle()
        world.log.clear()
    for rank in (first, 1 - first):
        for request in requests:
            world.submit(Wrong(request, REASON) if rank else request, rank)
        world.settle()
    for rank in range(2):
        assert sorted(entry[1] for entry in world.log[rank]) == [request.key for request in requests]
        assert len(set(world.refused(rank))) == 1
    assert not world.coordinator._rejections._by_key
    world.log.clear()
    for request in requests:
        world.submit(request)
    world.settle()
    assert world.ran(0) == [[request.name for request in requests]]


def test_a_group_that_comes_one_by_one_leaves_nothing_of_what_was_refused():
    world, requests = World(2), group(3)
    for request in requests:
        world.submit(Wrong(request, REASON), 1)
    world.settle()
    for request in requests:
        world.submit(request, 0)
        world.settle()
    assert len(world.refused(0)) == len(world.refused(1)) == 3
    assert not world.coordinator._rejections._by_key


@pytest.mark.parametrize("lengths", [(2, 3), (3, 2), (1, 4)])
def test_groups_of_different_lengths_are_a_mismatch(lengths):
    world = World(2)
    for rank, length in enumerate(lengths):
        for request in group(length):
            world.submit(request, rank)
    world.settle()
    world.wait()
    for rank, length in enumerate(lengths):
        assert len(world.refused(rank)) == length
        (text,) = set(world.refused(rank))
        expected = f"number of tensors in the group: {lengths[0]} on rank 0; {lengths[1]} on rank 1"
        assert expected in text
    for request in group(2):
        world.submit(request)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["g[0]", "g[1]"]]


@st.composite
def wrong_scripts(draw):
    """Scripts in which some ranks refuse some calls."""
    size, sets, script = draw(scripts())
    calls = [
        {
            rank: Wrong(request, f"reason {number}") if draw(st.integers(0, 5)) == 0 else request
            for rank, request in call.items()
        }
        for number, call in enumerate(script.calls)
    ]
    return size, sets, Script(calls)


@settings(max_examples=200)
@given(wrong_scripts(), st.integers(0, 3), st.booleans(), st.integers(0, 1 << 32))
def test_whatever_the_order_each_call_ends_alike_on_all_ranks(scripted, capacity, hosted, seed):
    size, sets, script = scripted
    chance = random.Random(seed)
    ranks = list(range(size))
    chance.shuffle(ranks)
    hosts = (tuple(sorted(ranks[: max(2, size - 1)])),) if hosted else ()
    world = HostedWorld(size, sets, capacity=capacity, hosts=hosts)
    script.play(world, chance)
    for rank in range(size):
        assert outcomes(world, rank) == script.expected(rank)
    assert not world.coordinator._rejections._by_key
    assert not world.coordinator.is_waiting


def test_a_worker_with_a_refused_call_is_not_alone():
    world = World(2)
    for _ in range(2):
        world.submit(tensor(), urgent=True)
        world.settle()
    worker: Worker = world.workers[0]
    worker.submit(tensor(), urgent=True)
    assert worker.schedule() is not None
    worker.reject(tensor("b"), REASON)
    assert worker.schedule() is None
    assert worker.has_news


# Engines.

pytestmark = pytest.mark.usefixtures("transport")

SPLITS = {"operation": Operation.ALLTOALL, "splits": (1, 2)}
REFUSED = {
    "splits that are too many": (SPLITS, {"splits": (1, 1, 1)}, "splits has 3 entries"),
    "splits above the rows": (SPLITS, {"splits": (3, 3)}, "must be non-negative and add up"),
    "splits of floats": (SPLITS, {"splits": (1.0, 2.0)}, "must consist of integers"),
    "a root outside": ({"operation": Operation.BROADCAST, "root_rank": 0}, {"root_rank": 7}, "root rank 7"),
    "a factor that is no number": ({}, {"prescale_factor": float("inf")}, "a scale factor of inf"),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_arguments_refused_on_one_rank_end_the_call_on_all(case, named):
    right, wrong, says = REFUSED[case]

    def body(engine):
        fields = right | (wrong if engine.topology.rank == 1 else {})
        error = outcome(lambda: run(engine, ones(engine), name, **fields))
        return error, run(engine, ones(engine), name, **right), run(engine, ones(engine), "other")[0]

    name = "x" if named else None
    with running(2) as job:
        (first, *after), (own, *_) = job.run(body)
    assert isinstance(own, InvalidRequestError)
    assert says in str(own)
    assert isinstance(first, MismatchError)
    assert f"rank 1 refused the call: {own}" in str(first)
    assert first.property == "arguments"
    assert first.values == {1: str(own)}
    assert first.tensor == name if named else ".noname." in first.tensor
    assert after[1] == 3.0


def test_adasum_on_three_ranks_that_only_one_of_them_asks_for():
    def body(engine):
        op = ReduceOp.ADASUM if engine.topology.rank == 2 else ReduceOp.SUM
        error = outcome(lambda: run(engine, ones(engine), "x", op=op))
        return error, run(engine, ones(engine), "x")[0]

    with running(3) as job:
        errors, results = zip(*job.run(body), strict=True)
    assert [type(error) for error in errors] == [RefusedCallError, RefusedCallError, type(errors[2])]
    assert isinstance(errors[2], NotImplementedError)
    assert "rank 2 refused the call: allreduce 'x': op Adasum needs a power of two of ranks, not 3" in str(errors[0])
    assert results == (6.0,) * 3


@pytest.mark.parametrize("change", ["add", "remove"])
def test_a_change_of_process_sets_that_is_wrong_on_one_rank(change):
    def body(engine):
        engine.add_process_set([0, 1])
        wrong = engine.topology.rank == 1
        if change == "add":
            error = outcome(lambda: engine.add_process_set([1, 0] if wrong else [0, 2]))
        else:
            error = outcome(lambda: engine.remove_process_set(np.int64(5 if wrong else 1)))
        return error, engine.add_process_set(np.array([1, 2]))

    with running(3) as job:
        errors, ids = zip(*job.run(body), strict=True)
    assert [type(error) for error in errors] == [RefusedCallError, InvalidRequestError, RefusedCallError]
    assert f"rank 1 refused the call: {errors[1]}" in str(errors[0])
    assert ids == (2, 2, 2)


def test_a_retry_may_come_before_the_others_come_at_all():
    with running(2) as job:
        first, second = job.engines
        with pytest.raises(InvalidRequestError):
            run(second, ones(second), "x", prescale_factor=float("nan"))
        retry = submit(second, ones(second), "x")
        assert isinstance(outcome(lambda: run(first, ones(first), "x")), MismatchError)
        assert run(first, ones(first), "x")[0] == 3.0
        assert wait(second, retry)[0] == 3.0


def test_only_a_retry_waits_for_the_ranks_that_do_not_come():
    with running(2, stall_warning=0.05, stall_shutdown=0.2) as job:
        second = job.engines[1]
        outcome(lambda: run(second, ones(second), "x", prescale_factor=float("nan")))
        error = outcome(lambda: run(second, ones(second), "x"))
    assert isinstance(error, CollectiveTimeoutError)
    assert "missing rank 0: 'x'" in str(error)


def test_a_wrong_call_under_a_name_in_flight_leaves_that_alone():
    with running(2) as job:
        first, second = job.engines
        work = submit(second, ones(second), "x")
        with pytest.raises(InvalidRequestError, match="a scale factor"):
            run(second, ones(second), "x", prescale_factor=float("nan"))
        assert run(first, ones(first), "x")[0] == 3.0
        assert wait(second, work)[0] == 3.0


def test_a_call_that_every_rank_refuses_leaves_nothing_behind():
    def body(engine):
        for _ in range(3):
            with pytest.raises(InvalidRequestError):
                run(engine, ones(engine), "x", prescale_factor=float("nan"))
        return run(engine, ones(engine), "x")[0]

    with running(3) as job:
        assert job.run(body) == [6.0] * 3
        until(lambda: not any(engine._works._rejected for engine in job.engines))


@pytest.mark.usefixtures("unhurried")
def test_a_refused_call_ends_the_bypass_and_the_others_hear_of_it():
    def body(engine):
        for _ in range(6):
            run(engine, ones(engine), "x")

    def wrong(engine):
        factor = float("nan") if engine.topology.rank else 1.0
        return outcome(lambda: run(engine, ones(engine), "x", prescale_factor=factor))

    with running(2) as job:
        job.run(body)
        until(lambda: all(engine._loop._bypass.on for engine in job.engines))
        first, second = job.run(wrong)
        assert isinstance(first, MismatchError)
        assert isinstance(second, InvalidRequestError)
        job.run(body)


def test_numbers_of_numpy_are_plain_numbers():
    def body(engine):
        rows = np.arange(4.0)
        received = run(engine, rows, "a", Operation.ALLTOALL, splits=np.array([1, 3]))
        root = run(engine, ones(engine), "b", Operation.BROADCAST, root_rank=np.int64(1))
        scaled = run(engine, ones(engine), "c", prescale_factor=np.float32(0.5))
        return list(received), root[0], scaled[0]

    with running(2) as job:
        assert job.run(body) == [([0.0, 0.0], 2.0, 1.5), ([1.0, 2.0, 3.0] * 2, 2.0, 1.5)]


def test_groups_of_different_lengths_end_on_all_ranks():
    def body(engine):
        count = 2 + engine.topology.rank
        requests = [replace(request, dtype=DType.FLOAT64, shape=(3,)) for request in group(count)]
        error = run_group(engine, requests)
        again = [replace(request, dtype=DType.FLOAT64, shape=(3,)) for request in group(2)]
        return error, run_group(engine, again)

    with running(2) as job:
        for error, after in job.run(body):
            assert isinstance(error, MismatchError)
            assert "number of tensors in the group: 2 on rank 0; 3 on rank 1" in str(error)
            assert after == [3.0, 3.0]


@pytest.mark.parametrize("unnamed", [True, False])
def test_a_group_with_one_wrong_tensor_is_refused_as_a_whole(unnamed):
    def body(engine):
        requests = [replace(request, dtype=DType.FLOAT64, shape=(3,)) for request in group(3)]
        wrong = [requests[0], replace(requests[1], prescale_factor=float("nan")), requests[2]]
        error = outcome(lambda: run_group(engine, wrong if engine.topology.rank else requests, unnamed))
        return error, run_group(engine, requests, unnamed)

    with running(2) as job:
        (first, after), (second, _) = job.run(body)
    assert isinstance(first, MismatchError)
    assert isinstance(second, InvalidRequestError)
    assert f"rank 1 refused the call: {second}" in str(first)
    assert after == [3.0] * 3


def run_group(engine, requests, unnamed=False):
    """The first elements of the sums."""
    works = [Work(request, as_buffer(ones(engine)), lambda shape: empty(DType.FLOAT64, shape)) for request in requests]
    engine.submit_group(works, unnamed)
    ended = [outcome(lambda work=work: wait(engine, work)[0]) for work in works]
    errors = [each for each in ended if isinstance(each, Exception)]
    assert not errors or len(errors) == len(works)
    return errors[0] if errors else ended
