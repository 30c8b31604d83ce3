"""Ranks that join while the engines of others go on."""

import threading

import numpy as np
import pytest

from collectives.api import (
    DType,
    InvalidRequestError,
    MismatchError,
    Operation,
    ReduceOp,
    Request,
)
from collectives.backends.memory import HostMemory
from collectives.buffers import empty
from collectives.engine.work import neutral
from collectives.engine.work_table import UNNAMED
from tests.collectives.engine.job import (
    PATIENCE,
    Caller,
    ones,
    outcome,
    run,
    running,
    submit,
    total,
    until,
    wait,
)

AVERAGE = ReduceOp.AVERAGE
pytestmark = pytest.mark.usefixtures("transport")


# Joins.


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_with_less_data_join(size):
    """Rank r has r + 1 batches."""

    def body(engine):
        batches = range(engine.topology.rank + 1)
        steps = [(run(engine, ones(engine), "x")[0], run(engine, ones(engine), op=AVERAGE)[0]) for _ in batches]
        last = engine.join()
        return steps, last, run(engine, ones(engine))[0]

    with running(size) as job:
        for rank, (steps, last, after) in enumerate(job.run(body)):
            alive = [sum(range(first + 1, size + 1)) for first in range(rank + 1)]
            np.testing.assert_allclose(steps, [(each, each / size) for each in alive])
            assert last == size - 1
            assert after == total(size)[0]


def test_a_joined_rank_changes_nothing_in_any_operation():
    checks = {}

    def body(engine):
        if engine.topology.rank == 1:
            return engine.join()
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            for values in (np.array([-3.0, 2.0]), np.array([-3, 2], np.int8), np.array([-2.0, 4.0], np.float16)):
                np.testing.assert_array_equal(run(engine, values, op=op), values)
        np.testing.assert_array_equal(run(engine, ones(engine), op=ReduceOp.ADASUM), ones(engine))
        rows = np.array([[1, 2], [3, 4]])
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.ALLGATHER), rows)
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.REDUCESCATTER), rows[:1])
        np.testing.assert_array_equal(run(engine, rows, operation=Operation.BROADCAST, root_rank=0), rows)
        received = run(engine, rows, operation=Operation.ALLTOALL, splits=(1, 1))
        np.testing.assert_array_equal(received, rows[:1])
        engine.barrier()
        error = outcome(lambda: run(engine, rows, operation=Operation.BROADCAST, root_rank=1))
        assert isinstance(error, MismatchError)
        checks["done"] = True
        return engine.join()

    with running(2) as job:
        assert job.run(body) == [0, 0]
    assert checks


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.real is dtype])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_the_neutral_element(op, dtype):
    buffer = empty(dtype, (1,))
    HostMemory().fill(buffer, neutral(op, dtype))
    element = buffer.host
    values = np.array([0, 1, 0x3F80, 0xBF80]).astype(dtype.storage)
    if dtype is DType.BFLOAT16:
        element, values = ((each.astype(np.uint32) << 16).view(np.float32) for each in (element, values))
    combine = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PRODUCT: np.multiply}[op]
    np.testing.assert_array_equal(combine(values, element), values)


def test_a_process_set_joins_for_itself():
    def body(engine):
        rank = engine.topology.rank
        if rank == 2:
            return run(engine, ones(engine), "all")[0]
        if rank == 0:
            sums = [run(engine, ones(engine), "pair", process_set=1)[0] for _ in range(2)]
        last = engine.join(process_set=1)
        return run(engine, ones(engine), "all")[0], last, rank or sums

    with running(3, sets=[(0, 1)]) as job:
        first, second, third = job.run(body)
    assert first == (6.0, 0, [1.0, 1.0])
    assert second == (6.0, 0, 1)
    assert third == 6.0


@pytest.mark.parametrize("operation", [Operation.ALLREDUCE, Operation.ALLGATHER])
def test_more_unnamed_tensors_than_there_are_names_come_before_a_join(operation):
    """Rank r has UNNAMED * r + 100, so that ranks join while others, and they themselves, wait for names."""

    def body(engine):
        counts = [UNNAMED * (rank + 1) + 100 for rank in range(3)]
        works = [submit(engine, ones(engine, 1), operation=operation) for _ in range(counts[engine.topology.rank])]
        last = engine.join()
        for number, work in enumerate(works):
            rows = [rank + 1.0 for rank, count in enumerate(counts) if number < count]
            expected = rows if operation is Operation.ALLGATHER else [sum(rows)]
            assert wait(engine, work).tolist() == expected, number
        return last, run(engine, ones(engine))[0]

    with running(3) as job:
        (last,) = {last for last, _ in job.run(body)}
    assert last in range(3)


def test_of_two_threads_that_join_at_once_one_is_refused():
    with running(2) as job:
        engine, other = job.engines
        check, both = engine._submitter.check, threading.Barrier(2)
        engine._submitter.check = lambda request: (check(request), both.wait(PATIENCE))
        threads = [Caller(engine, body=lambda engine: engine.join()) for _ in range(2)]
        until(lambda: not all(thread.is_alive() for thread in threads))
        other.join()
        results = [thread.result() for thread in threads]
        assert [type(each) for each in sorted(results, key=str)] == [int, InvalidRequestError]
        engine._submitter.check = check
        job.run(lambda engine: run(engine, ones(engine)))


def test_sets_are_changed_by_one_thread_while_a_join_of_another_ends():
    def change(engine):
        return engine.add_process_set([1])

    with running(2) as job:
        engine, other = job.engines
        job.run(lambda engine: engine.add_process_set([0]))
        joined = Caller(engine, body=lambda engine: engine.join())
        until(lambda: engine._submitter._joins)
        changed = Caller(engine, body=change)
        until(lambda: len(engine._works._works) == 2)
        assert other.join() == joined.result() == 1
        assert change(other) == changed.result() == 2


def test_a_rank_that_has_joined_submits_nothing():
    with running(2, sets=[(0,)]) as job:
        engine, other = job.engines
        joined = Caller(engine, body=lambda engine: engine.join())
        until(lambda: engine._works)
        for call in (lambda: submit(engine, ones(engine), "x"), engine.join, engine.barrier):
            error = outcome(call)
            assert isinstance(error, InvalidRequestError)
            assert "rank 0 has joined process set 0; submit tensors before join()" in str(error)
        assert run(engine, ones(engine), process_set=1)[0] == 1.0
        assert other.join() == 1
        assert joined.result() == 1
        job.run(lambda engine: run(engine, ones(engine), "x"))


def test_a_join_that_was_interrupted_is_still_a_join(monkeypatch):
    """Or tensors of this rank would meet others that were computed without it."""
    with running(2) as job:
        engine, other = job.engines
        with monkeypatch.context() as patch:
            patch.setattr(engine._progress, "wait", lambda work: interrupt())
            with pytest.raises(KeyboardInterrupt):
                engine.join()
        with pytest.raises(InvalidRequestError, match="rank 0 has joined process set 0"):
            submit(engine, ones(engine), "x")
        assert run(other, ones(other), "x")[0] == 2.0
        assert other.join() == 1
        until(
            lambda: not isinstance(outcome(lambda: engine._submitter.check(Request("x", Operation.BARRIER))), Exception)
        )
        assert job.run(lambda engine: run(engine, ones(engine))[0]) == [3.0, 3.0]


def interrupt():
    raise KeyboardInterrupt
