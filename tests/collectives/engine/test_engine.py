"""All collectives on the engines of several ranks, which are threads of this process."""

import random
import threading

import numpy as np
import pytest

from collectives.api import (
    MismatchError,
    Operation,
    ReduceOp,
    Request,
)
from collectives.buffers import as_buffer
from tests.collectives.engine.job import (
    Job,
    ones,
    outcome,
    run,
    running,
    submit,
    total,
    wait,
)

SIZES = [1, 2, 3, 4]
pytestmark = pytest.mark.usefixtures("transport")


# Every collective.


def check_allreduce(engine, size):
    expected = {ReduceOp.SUM: sum(range(1, size + 1)), ReduceOp.MIN: 1, ReduceOp.MAX: size}
    expected[ReduceOp.AVERAGE] = expected[ReduceOp.SUM] / size
    for op, value in expected.items():
        np.testing.assert_array_equal(run(engine, ones(engine), op=op), np.full(3, float(value)))
    if size != 3:
        orthogonal = 3.0 * (np.arange(4) == engine.topology.rank)
        np.testing.assert_array_equal(run(engine, orthogonal, op=ReduceOp.ADASUM), 3.0 * (np.arange(4) < size))
    scaled = run(engine, ones(engine), prescale_factor=0.5, postscale_factor=4.0)
    np.testing.assert_array_equal(scaled, 2.0 * total(size))


def check_allgather(engine, size):
    rank = engine.topology.rank
    gathered = run(engine, np.full((rank, 2), rank), operation=Operation.ALLGATHER)
    np.testing.assert_array_equal(gathered, [[member] * 2 for member in range(size) for _ in range(member)] or 0)
    assert gathered.shape == (sum(range(size)), 2)


def check_broadcast(engine, size):
    for root in range(size):
        received = run(engine, ones(engine), operation=Operation.BROADCAST, root_rank=root)
        np.testing.assert_array_equal(received, np.full(3, root + 1.0))


def check_alltoall(engine, size):
    """Rank r sends s + r % 2 rows to rank s, and one row to nobody."""
    rank = engine.topology.rank
    splits = tuple(member + rank % 2 for member in range(size))
    rows = np.array([[rank, member] for member in range(size) for _ in range(splits[member])] + [[-1, -1]])
    work = submit(engine, rows, "exchange", Operation.ALLTOALL, splits=splits)
    received = wait(engine, work)
    expected = [[member, rank] for member in range(size) for _ in range(rank + member % 2)]
    np.testing.assert_array_equal(received, np.array(expected, int).reshape(-1, 2))
    assert work.received_splits == tuple(rank + member % 2 for member in range(size))


def check_reducescatter(engine, size):
    rows = np.arange(2 * (size + 1)).reshape(size + 1, 2)  # the first rank gets one row more
    for op, factor in ((ReduceOp.SUM, size), (ReduceOp.AVERAGE, 1)):
        scattered = run(engine, rows, operation=Operation.REDUCESCATTER, op=op)
        mine = slice(0, 2) if engine.topology.rank == 0 else slice(engine.topology.rank + 1, engine.topology.rank + 2)
        np.testing.assert_array_equal(scattered, rows[mine] * factor)


def check_barrier(engine, size):
    for _ in range(3):
        engine.barrier()


CHECKS = [
    check_allreduce,
    check_allgather,
    check_broadcast,
    check_alltoall,
    check_reducescatter,
    check_barrier,
]


@pytest.mark.parametrize("cache_capacity", [0, 1, 1024])
@pytest.mark.parametrize("size", SIZES)
def test_every_collective_on_every_rank(size, cache_capacity):
    with running(size, cache_capacity=cache_capacity) as job:
        for _ in range(2):
            for check in CHECKS:
                job.run(lambda engine, check=check: check(engine, size))


def test_an_in_place_destination_is_written():
    def body(engine):
        values = ones(engine)
        buffer = as_buffer(values)
        request = Request("x", Operation.ALLREDUCE, buffer.dtype, buffer.shape)
        assert engine.run(request, buffer, buffer).result() is buffer
        return values

    with running(2) as job:
        for values in job.run(body):
            np.testing.assert_array_equal(values, total(2))


# Order, names and handles.


@pytest.mark.parametrize("threshold", [0, 64, 1 << 20])
def test_ranks_may_submit_in_any_order(threshold):
    names = [f"t{number}" for number in range(40)]

    def body(engine):
        order = random.Random(engine.topology.rank)
        for step in range(3):
            works = {name: submit(engine, ones(engine) + step, name) for name in order.sample(names, len(names))}
            for name in order.sample(names, len(names)):
                np.testing.assert_array_equal(wait(engine, works[name]), total(3) + 3 * step)

    with running(3, fusion_threshold=threshold) as job:
        job.run(body)


# Disagreement.


def test_a_mismatch_is_raised_on_all_members_and_nothing_else_is_disturbed():
    def body(engine):
        other = submit(engine, ones(engine), "other")
        odd = outcome(lambda: run(engine, np.ones(3 + engine.topology.rank // 2), "x"))
        return odd, wait(engine, other)[0], run(engine, ones(engine), "x")[0]

    with running(3) as job:
        results = job.run(body)
    errors = [error for error, _, _ in results]
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert {str(error) for error in errors} == {
        "tensor 'x': the ranks disagree about the shape: (3,) on ranks 0, 1; (4,) on rank 2. "
        "Submit the same shape under this name on every rank"
    }
    said = {0: "(3,)", 1: "(3,)", 2: "(4,)"}
    assert [(error.tensor, error.property, error.values) for error in errors] == [("x", "shape", said)] * 3
    assert [rest for _, *rest in results] == [[6.0, 6.0]] * 3


# Process sets.


def test_overlapping_process_sets_in_any_order():
    sets = [(0, 1), (1, 2), (0, 1, 2)]

    def body(engine):
        rank = engine.topology.rank
        mine = [id for id, members in enumerate([*sets[:2], (0, 1, 2, 3)], 1) if rank in members and id < 3]
        ids = [0, *mine]
        for step in range(20):
            order = random.Random(100 * rank + step).sample(ids, len(ids))
            works = {id: submit(engine, ones(engine), "x", process_set=id) for id in order}
            sums = {id: wait(engine, works[id])[0] for id in order}
            assert sums == {id: {0: 10.0, 1: 3.0, 2: 5.0}[id] for id in ids}

    with running(4, sets=sets[:2]) as job:
        job.run(body)


def test_barriers_and_roots_of_a_process_set():
    def body(engine):
        rank = engine.topology.rank
        if rank:
            engine.barrier(process_set=1)
            received = run(engine, ones(engine), operation=Operation.BROADCAST, root_rank=2, process_set=1)
            gathered = run(engine, np.array([rank]), operation=Operation.ALLGATHER, process_set=1)
            return received[0], gathered.tolist()
        return None

    with running(3, sets=[(1, 2)]) as job:
        assert job.run(body) == [None, (3.0, [1, 2]), (3.0, [1, 2])]


def test_a_barrier_returns_when_all_have_come():
    come = []

    def body(engine):
        for number in range(10):
            come.append(number)
            engine.barrier()
            assert come.count(number) == 3

    with running(3) as job:
        job.run(body)


# Threads of one rank.


def test_threads_of_a_rank_submit_and_wait_at_once():
    threads, rounds = 4, 25

    def work(engine, number):
        sums = [run(engine, ones(engine) + step, f"thread-{number}")[0] for step in range(rounds)]
        results.append(sums == [3.0 + 2 * step for step in range(rounds)])

    def body(engine):
        numbers = random.Random(engine.topology.rank).sample(range(threads), threads)
        workers = [threading.Thread(target=work, args=(engine, number)) for number in numbers]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    results = []
    with running(2) as job:
        job.run(body)
    assert results == [True] * threads * 2


# Several jobs.


def test_a_job_is_made_of_any_number_of_engines_in_one_process():
    """Two jobs side by side do not meet."""
    first, second = Job(2), Job(2)
    try:
        assert first.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
        first.shutdown()
        assert second.run(lambda engine: run(engine, ones(engine), "x")[0]) == [3.0] * 2
    finally:
        first.shutdown(), second.shutdown()
