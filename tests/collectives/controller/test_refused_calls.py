"""Calls of join() and of groups that a binding refuses on one rank before it knows what the other ranks submit."""

import threading

import numpy as np
import pytest

from collectives.api import DType, InvalidRequestError, Operation, RefusedCallError, Request
from collectives.buffers import as_buffer
from collectives.engine.work import Work
from tests.collectives.engine.job import PATIENCE, ones, outcome, run, running, total

JOIN = Request("join", Operation.JOIN)


def refuse(engine, requests, unnamed):
    engine.reject(requests, InvalidRequestError("a wrong argument"), unnamed)


def group(length):
    return [
        Request(f"g[{place}]", Operation.ALLREDUCE, DType.FLOAT64, (2,), group="g", group_size=length)
        for place in range(length)
    ]


def run_group(engine, length, unnamed=False):
    """The sums of a group of ones."""
    buffers = [as_buffer(np.ones(2)) for _ in range(length)]
    works = [Work(request, each, each) for request, each in zip(group(length), buffers, strict=True)]
    engine.submit_group(works, unnamed=unnamed)
    return [float(engine.synchronize(work).owner[0]) for work in works]


# Joins.


@pytest.mark.parametrize("size", [2, 3])
def test_a_join_that_one_rank_refuses_ends_on_all_that_have_joined(size):
    """Afterwards they train, and join together."""
    told = threading.Barrier(size)

    def body(engine):
        if engine.topology.rank == 1:
            refuse(engine, [JOIN], True)
            error = None
        else:
            error = outcome(engine.join)
        told.wait(PATIENCE)
        sums = run(engine, ones(engine), "x")
        return error, sums[0], engine.join() in range(size)

    with running(size) as job:
        for rank, (error, sums, has_joined) in enumerate(job.run(body)):
            assert has_joined
            assert sums == total(size)[0]
            assert rank == 1 or isinstance(error, RefusedCallError)
            assert rank == 1 or "rank 1 refused the call: a wrong argument" in str(error)


@pytest.mark.parametrize("has_joined", [True, False])
def test_a_rank_may_join_after_a_join_that_it_refused_while_others_train(has_joined):
    """They do not wait for it; ``has_joined``: nor does rank 0, which has joined."""

    def body(engine):
        rank = engine.topology.rank
        if rank == 1:
            refuse(engine, [JOIN], True)
        elif rank == 2 or not has_joined:
            for _ in range(3):
                run(engine, ones(engine), "x")
        return engine.join()

    for _ in range(5):
        with running(3) as job:
            assert len(set(job.run(body))) == 1


def test_all_ranks_may_refuse_a_join():
    def body(engine):
        for _ in range(3):
            refuse(engine, [JOIN], True)
        return engine.join()

    with running(2) as job:
        assert set(job.run(body)) <= {0, 1}


# Groups.


@pytest.mark.parametrize("unnamed", [False, True])
@pytest.mark.parametrize("length", [1, 2, 4])
def test_a_refused_group_of_another_length_ends_all_tensors_of_the_group(unnamed, length):
    """The rank submits the right group at once: none of its tensors may meet those of the call before."""

    def body(engine):
        if engine.topology.rank == 1:
            refuse(engine, group(length), unnamed)
            error = None
        else:
            error = outcome(lambda: run_group(engine, 3, unnamed))
        return error, run_group(engine, 3, unnamed), run_group(engine, 3, unnamed)

    for _ in range(5):
        with running(3) as job:
            for rank, (error, *sums) in enumerate(job.run(body)):
                assert sums == [[3.0] * 3] * 2
                assert rank == 1 or "rank 1 refused the call: a wrong argument" in str(error)


def test_all_ranks_refuse_groups_of_different_lengths():
    def body(engine):
        for first in range(3):
            refuse(engine, group(1 + (first + engine.topology.rank) % 3), False)
        return run_group(engine, 3)

    with running(3) as job:
        assert job.run(body) == [[3.0] * 3] * 3
