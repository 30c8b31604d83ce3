"""Ranks that agree without the coordinator on several tensors."""

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
from tests.collectives.engine.bypass_job import Counting, all_bypass, bypass_of, group_of, results_of, round_of, stories
from tests.collectives.engine.job import Caller, ones, submit, total, until, wait

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
