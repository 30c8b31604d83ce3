"""Ranks that agree without the coordinator on one or several tensors, and come back to it."""

import functools

import numpy as np
import pytest

from collectives.api import (
    DType,
    Operation,
    PeerLostError,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer, empty
from collectives.engine.work import Work
from collectives.events import Decided, Finished, Started
from tests.collectives.engine.bypass_job import (
    NAMES,
    Counting,
    OneByOne,
    all_bypass,
    bypass_of,
    first_elements,
    group_of,
    in_halves,
    results_of,
    round_of,
    stories,
    submit_at_once,
    together,
    warm_up,
    whole,
    worker_of,
)
from tests.collectives.engine.job import Caller, ones, run, submit, total, until, wait


@pytest.mark.usefixtures("unhurried")
def test_one_tensor_at_a_time_needs_no_messages(start):
    def body(engine):
        return [run(engine, ones(engine), "x")[0] for _ in range(20)]

    with start(3, wrap=Counting) as job:
        job.run(warm_up)
        until(lambda: all_bypass(job))
        before = [channel.sent for channel in job.channels]
        assert job.run(body) == [[6.0] * 20] * 3
        assert [channel.sent for channel in job.channels] == before
        assert all_bypass(job)


OPERATIONS = {
    "allreduce": {},
    "average": {"op": ReduceOp.AVERAGE, "prescale_factor": 2.0, "postscale_factor": 3.0},
    "adasum": {"op": ReduceOp.ADASUM},
    "allgather": {"operation": Operation.ALLGATHER},
    "broadcast": {"operation": Operation.BROADCAST, "root_rank": 1},
    "alltoall": {"operation": Operation.ALLTOALL, "splits": (1, 3)},
    "reducescatter": {"operation": Operation.REDUCESCATTER},
}


@pytest.mark.parametrize("rows", [0, 4, 300_000])
@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.usefixtures("unhurried")
def test_every_operation_gives_what_it_gives_otherwise(start, kind, rows):
    def body(engine):
        values = np.arange(rows, dtype=np.float64) + engine.topology.rank
        results = []
        for _ in range(6):
            results.append(run(engine, values, kind, **fields))
            modes.append(bypass_of(engine).on)
        return [result.tolist() == results[0].tolist() for result in results]

    fields, modes = OPERATIONS[kind], []
    if kind == "alltoall":
        fields = fields | {"splits": (rows // 4, rows - rows // 4)}
    with start(2) as job:
        assert job.run(body) == [[True] * 6] * 2
    assert modes[-4:] == [True] * 4


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.ADASUM])
@pytest.mark.usefixtures("unhurried")
def test_an_in_place_tensor_is_not_spoiled_by_an_attempt_that_fails(start, op):
    """Scaled before, larger than a buffer; the other rank has something else to do first."""

    def body(engine):
        warm_up(engine)
        array = np.full(300_000, 1.0 + engine.topology.rank)
        source = as_buffer(array)
        for step in range(8):
            array[:] = 1.0 + engine.topology.rank
            assert bypass_of(engine).on or step not in (4, 5, 6)
            if step == 6 and engine.topology.rank:
                other = submit(engine, ones(engine), "y")
            request = Request("big", Operation.ALLREDUCE, source.dtype, source.shape, op=op, prescale_factor=2.0)
            engine.run(request, source, source)
            assert (array == (6.0 if op is ReduceOp.SUM else 3.0)).all()
        if engine.topology.rank == 0:
            other = submit(engine, ones(engine), "y")
        return wait(engine, other)[0]

    with start(2) as job:
        assert job.run(body) == [3.0, 3.0]


@pytest.mark.parametrize("rows", [0, 3, 300_000])
@pytest.mark.parametrize("listeners", [{0}, {1}, {0, 1}])
@pytest.mark.usefixtures("unhurried")
def test_events_are_the_same(start, listeners, rows):
    """Also where not all ranks listen, which must not change how often they cross the barrier."""

    def body(engine):
        seen, rank = [], engine.topology.rank
        if rank in listeners:
            engine.events.subscribe(seen.append)
        for step in range(8):
            assert (run(engine, np.full(rows, rank + step), "x") == 2 * step + 1).all()
        assert bypass_of(engine).on
        return seen

    with start(2) as job:
        of_ranks = job.run(body)
    for rank, seen in enumerate(of_ranks):
        submitted, others = stories(seen)
        assert len(submitted) == (8 if rank in listeners else 0)
        assert [type(event) for event in others] == [Decided, Started, Finished] * len(submitted)
        decided = [event for event in others if isinstance(event, Decided)]
        assert all(call.time <= batch.time for call, batch in zip(submitted, decided, strict=True))


def test_ranks_that_want_different_things_first_go_back_to_the_coordinator(start):
    def body(engine):
        for name in ("a", "b", "c"):
            warm_up(engine, name)
        names = ["a", "b", "c"]
        mine = names[engine.topology.rank :] + names[: engine.topology.rank]
        callers = [Caller(engine, name) for name in mine]
        return [caller.result()[0] for caller in callers]

    with start(3) as job:
        for _ in range(5):
            assert job.run(body) == [[6.0] * 3] * 3


def test_tensors_reported_before_the_bypass_began_run_in_the_same_order_everywhere(start):
    """Rank 1 says y before it hears that the bypass begins; the others, after it has begun."""
    with start(2, wrap=OneByOne) as job:
        first, second = job.engines
        for name in ("x", "y", "z"):
            job.run(lambda engine, name=name: warm_up(engine, name))
        job.run(lambda engine: results_of(engine, submit_at_once(engine, "yz")))
        job.run(lambda engine: run(engine, ones(engine), "x"))
        assert not all_bypass(job)
        until(lambda: first._progress._driving.lock.acquire(blocking=False))
        callers = [Caller(engine, "x") for engine in job.engines]
        until(lambda: worker_of(second)._in_flight and not worker_of(second)._ready_ids)
        callers.append(Caller(second, body=lambda engine: run(engine, 10 * ones(engine), "y")))
        until(lambda: len(worker_of(second)._in_flight) == 2)
        until(lambda: not second._loop.commands and not worker_of(second)._ready_ids)
        first._progress._driving.lock.release()
        assert [caller.result()[0] for caller in callers[:2]] == [3.0] * 2
        others = [submit(first, factor * ones(first), name) for name, factor in (("y", 10), ("z", 20))]
        callers.append(Caller(second, body=lambda engine: run(engine, 20 * ones(engine), "z")))
        assert [wait(first, work)[0] for work in others] == [30.0, 60.0]
        assert [caller.result()[0] for caller in callers[2:]] == [30.0, 60.0]


def sums(size, factor=1.0):
    return [factor * total(size)[0]] * len(NAMES)


def at_once(engine, factor=1.0):
    """As ``whole``, but the communication thread does not take up any before all are there and a caller waits."""
    return first_elements(engine, submit_at_once(engine, NAMES, factor, urged=True))


def learn(job, body):
    """Run ``body`` until the ranks run it without the coordinator."""
    for _ in range(6):
        assert job.run(body) == [sums(job.size)] * job.size
    until(lambda: all_bypass(job))


@pytest.mark.usefixtures("unhurried")
def test_a_step_of_several_batches_is_one_round_without_messages(start):
    with start(3, wrap=Counting, fusion_threshold=60) as job:
        learn(job, at_once)
        before = [channel.sent for channel in job.channels]
        rounds = [round_of(engine) for engine in job.engines]
        for step in range(10):
            factor = 1.0 + step
            assert job.run(lambda engine, factor=factor: at_once(engine, factor)) == [sums(3, factor)] * 3
        assert [channel.sent for channel in job.channels] == before
        assert [round_of(engine) for engine in job.engines] == [number + 10 for number in rounds]


@pytest.mark.usefixtures("unhurried")
def test_batches_have_numbers_of_one_order_with_and_without_the_coordinator(start):
    def body(engine):
        numbers = []
        engine.events.subscribe(lambda event: numbers.append(event.batch) if isinstance(event, Finished) else None)
        for step in range(12):
            (in_halves if step < 6 or step % 2 else whole)(engine)
        return numbers

    with start(2) as job:
        first, second = job.run(body)
    assert first == second == [*range(len(first))]


@pytest.mark.usefixtures("unhurried")
def test_a_rank_with_other_tensors_brings_all_back_to_the_coordinator(start):
    """The numbers of their schedules differ, even where both ranks attempt one."""
    with start(2) as job:
        for _ in range(5):
            job.run(lambda engine: run(engine, ones(engine), "a"))
        learn(job, at_once)
        caller = Caller(job.engines[1], body=at_once)
        until(lambda: round_of(job.engines[1]) > round_of(job.engines[0]))
        assert together(job.engines[0], ["a"]) == sums(2)[:1]
        assert together(job.engines[0], NAMES[1:]) == sums(2)[1:]
        assert caller.result() == sums(2)
        learn(job, at_once)
        assert job.run(at_once) == [sums(2)] * 2


MIXED = {
    "sum": {},
    "mean": {"op": ReduceOp.AVERAGE, "prescale_factor": 2.0},
    "gathered": {"operation": Operation.ALLGATHER},
    "sent": {"operation": Operation.BROADCAST, "root_rank": 1},
    "scattered": {"operation": Operation.REDUCESCATTER},
}


@pytest.mark.parametrize("threshold", [0, 1 << 27])
@pytest.mark.parametrize("rows", [0, 4, 50_000])
@pytest.mark.usefixtures("unhurried")
def test_tensors_of_different_kinds_run_together_without_messages(start, rows, threshold):
    def body(engine):
        array = np.arange(rows, dtype=np.float64) + engine.topology.rank
        return [
            results_of(engine, group_of(engine, "mixed", [array] * len(MIXED), [*MIXED.values()])) for _ in range(5)
        ]

    with start(2, wrap=Counting, fusion_threshold=threshold) as job:
        results = job.run(body)
        assert all(each == of_rank[0] for of_rank in results for each in of_rank)
        until(lambda: all_bypass(job))
        before = [channel.sent for channel in job.channels]
        assert job.run(body) == results
        assert [channel.sent for channel in job.channels] == before


@pytest.mark.usefixtures("unhurried")
def test_tensors_that_are_no_group_run_together_too(start):
    def body(engine, count):
        for step in range(count):
            with engine._callers:
                works = [Work(request, as_buffer(ones(engine)), allocate) for request in requests]
                works[(step + engine.topology.rank) % 3].urged = True
                engine._works.enter(works, False)
            assert [wait(engine, work).tolist() for work in works] == [total(2).tolist()] * 3

    allocate = functools.partial(empty, DType.FLOAT64)
    requests = [Request(name, Operation.ALLREDUCE, DType.FLOAT64, (3,), op=ReduceOp.SUM) for name in "xyz"]
    with start(2, wrap=Counting) as job:
        job.run(lambda engine: body(engine, 5))
        until(lambda: all_bypass(job))
        before = [channel.sent for channel in job.channels]
        job.run(lambda engine: body(engine, 20))
        assert [channel.sent for channel in job.channels] == before


@pytest.mark.usefixtures("unhurried")
def test_groups_run_in_place_and_are_not_spoiled_by_an_attempt_that_fails(start):
    """Scaled before, more than a buffer; one rank has something else to do first."""

    def body(engine):
        rank, arrays = engine.topology.rank, [np.zeros(length) for length in (200_000, 3, 1)]
        for step in range(20):
            for array in arrays:
                array[:] = 1.0 + rank
            if step == 10 and rank:
                other = submit(engine, ones(engine), "y")
            for work in group_of(engine, "group", arrays, in_place=True, prescale_factor=2.0):
                engine.synchronize(work)
            assert all((array == 6.0).all() for array in arrays)
            modes[rank].append(bypass_of(engine).on)
            if step == 10:
                other = other if rank else submit(engine, ones(engine), "y")
                assert wait(engine, other)[0] == 3.0

    modes = {0: [], 1: []}
    with start(2, fusion_threshold=1000) as job:
        job.run(body)
    for rank in range(2):
        assert modes[rank][4:10] == [True] * 6
        assert not modes[rank][10]
        assert modes[rank][15:] == [True] * 5


@pytest.mark.usefixtures("unhurried")
def test_several_batches_have_the_events_and_numbers_of_any_others(start):
    def body(engine):
        seen = []
        engine.events.subscribe(seen.append)
        arrays = [ones(engine), np.ones(2, np.int32), np.ones(0, np.float32)]
        for _ in range(10):
            for work in group_of(engine, "group", arrays):
                engine.synchronize(work)
        return seen

    with start(2) as job:
        of_ranks = job.run(body)
    for seen in of_ranks:
        submitted, others = stories(seen)
        assert [event.batch for event in others if isinstance(event, Finished)] == list(range(30))
        assert [event.batch for event in others if isinstance(event, Started)] == list(range(30))
        decided = [event for event in others if isinstance(event, Decided)]
        assert [event.batch for event in decided] == list(range(30))
        assert [type(event) for event in others] == ([Decided] * 3 + [Started, Finished] * 3) * 10
        assert all(call.time <= batch.time for call, batch in zip(submitted, decided, strict=True))


@pytest.mark.usefixtures("unhurried")
def test_new_parameters_end_the_schedules_of_the_earlier_ones(start):
    def body(engine):
        batches = []
        engine.events.subscribe(lambda event: batches.append(event.names) if isinstance(event, Started) else None)
        for step in range(20):
            if step == 10 and engine.topology.rank == 0:
                engine.propose(fusion_threshold=0)
            for work in group_of(engine, "group", [ones(engine), ones(engine)]):
                engine.synchronize(work)
            modes[engine.topology.rank].append(bypass_of(engine).on)
        return batches

    modes = {0: [], 1: []}
    with start(2) as job:
        first, second = job.run(body)
    assert first == second == [("group[0]", "group[1]")] * 10 + [("group[0]",), ("group[1]",)] * 10
    assert modes[0][4:10] + modes[0][15:] == [True] * 11


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.usefixtures("unhurried")
def test_a_rank_that_waits_for_several_tensors_learns_of_the_end(start, waiting):
    def body(engine):
        return results_of(engine, group_of(engine, "group", [ones(engine), ones(engine)]))

    with start(2) as job:
        for _ in range(5):
            job.run(body)
        until(lambda: all_bypass(job))
        caller = Caller(job.engines[waiting], body=body)
        until(lambda: round_of(job.engines[waiting]) > round_of(job.engines[1 - waiting]))
        job.vanish(1 - waiting)
        assert type(caller.result()) is PeerLostError
