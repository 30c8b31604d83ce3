"""Ranks that agree without the coordinator on one tensor, and come back to it."""

import numpy as np
import pytest

from collectives.api import (
    Operation,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer
from collectives.events import Decided, Finished, Started
from tests.collectives.engine.bypass_job import (
    Counting,
    OneByOne,
    all_bypass,
    bypass_of,
    results_of,
    stories,
    submit_at_once,
    warm_up,
    worker_of,
)
from tests.collectives.engine.job import Caller, ones, run, submit, until, wait


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
