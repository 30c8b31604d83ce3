"""Calls that repeat an earlier one: they take a shorter way, with the rules of any call."""

import functools

import numpy as np
import pytest

from collectives.api import (
    DType,
    DuplicateNameError,
    InvalidRequestError,
    Operation,
    ReduceOp,
    Request,
    ShutDownError,
)
from collectives.buffers import as_buffer, empty
from collectives.engine.threads import CommandQueue
from collectives.engine.work import Work
from collectives.engine.work_table import WorkTable
from collectives.net.channel import InprocHub
from tests.collectives.engine.job import Caller, kept_request, ones, run, running, submit, total, until, wait

CALLS = 100


def repeat(engine, times=4, name="x"):
    """The last of several equal calls, which bring the engine into the bypass."""
    for _ in range(times):
        result = run(engine, ones(engine), name)
    return result.tolist()


def submissions(job, monkeypatch):
    """The list that will have the works of each call that is submitted. The short way submits nothing."""
    seen = []

    def count(submit, works):
        seen.append(works)
        submit(works)

    for engine in job.engines:
        monkeypatch.setattr(engine._loop, "submit", functools.partial(count, engine._loop.submit))
    return seen


@pytest.fixture(params=[False, True], ids=["inproc", "shm"])
def job(request):
    """Two ranks in the bypass on "x"."""
    with running(2, shared_memory=request.param) as job:
        job.run(repeat)
        yield job


def test_a_repeated_call_is_not_submitted(job, monkeypatch):
    """Unless the communication thread drives at the same time, which happens rarely."""
    seen = submissions(job, monkeypatch)
    assert job.run(lambda engine: repeat(engine, CALLS)) == [total(2).tolist()] * 2
    assert len(seen) < CALLS


def test_an_alltoall_without_splits_repeats_itself(job, monkeypatch):
    def exchange(engine, times=CALLS):
        source = as_buffer(np.array([10.0, 20.0]) + engine.topology.rank)
        request = kept_request("t", Operation.ALLTOALL, source.dtype, source.shape)
        for _ in range(times):
            work = engine.run(request, source, lambda shape: empty(source.dtype, shape))
        return work.output.owner.tolist()

    job.run(lambda engine: exchange(engine, 4))
    seen = submissions(job, monkeypatch)
    assert job.run(exchange) == [[10.0, 11.0], [20.0, 21.0]]
    assert len(seen) < CALLS


@pytest.mark.parametrize("times", [1, 2])
def test_a_call_does_not_repeat_that_of_an_earlier_set_with_the_same_id(times):
    """The new set has other members, and so other equal shares."""

    def exchange(engine, ranks):
        id = engine.add_process_set(ranks)
        results = []
        if engine.topology.rank in ranks:
            fields = {"op": ReduceOp.SUM, "process_set": id}
            results = [run(engine, ones(engine, 6), "t", Operation.ALLTOALL, **fields).tolist() for _ in range(times)]
        engine.barrier()
        engine.remove_process_set(id)
        return id, results

    with running(3) as job:
        job.run(lambda engine: exchange(engine, [0]))
        mixed = [1.0] * 3 + [2.0] * 3
        assert job.run(lambda engine: exchange(engine, [0, 1])) == [(1, [mixed] * times)] * 2 + [(1, [])]


def test_a_call_with_other_arguments_does_not_repeat(job):
    def change(engine):
        small = [run(engine, ones(engine), "x", op=op).tolist() for op in (ReduceOp.MAX, ReduceOp.SUM, ReduceOp.MAX)]
        return [*small, run(engine, ones(engine, 5), "x").tolist()]

    assert job.run(change) == [[[2.0] * 3, [3.0] * 3, [2.0] * 3, [3.0] * 5]] * 2


def test_ranks_that_do_not_repeat_together_negotiate(job):
    """One rank has another tensor in flight, which the other submits after the repeated call."""

    def body(engine):
        other = submit(engine, ones(engine), "y") if engine.topology.rank else None
        results = [run(engine, ones(engine), "x").tolist()]
        other = other or submit(engine, ones(engine), "y")
        return [*results, wait(engine, other).tolist(), repeat(engine)]

    for _ in range(3):
        assert job.run(body) == [[total(2).tolist()] * 3] * 2


def test_a_rank_that_has_joined_does_not_repeat(job):
    joining = Caller(job.engines[0], body=lambda engine: engine.join())
    until(lambda: job.engines[0]._submitter._joins)
    with pytest.raises(InvalidRequestError, match="has joined"):
        repeat(job.engines[0])
    assert job.engines[1].join() == joining.result()


def test_a_name_in_flight_is_not_used_twice(job):
    first = submit(job.engines[0], ones(job.engines[0]), "x")
    with pytest.raises(DuplicateNameError):
        repeat(job.engines[0])
    second = submit(job.engines[1], ones(job.engines[1]), "x")
    assert [wait(engine, work).tolist() for engine, work in zip(job.engines, (first, second), strict=True)] == [
        total(2).tolist()
    ] * 2


def test_nothing_repeats_after_the_end(job):
    job.shutdown()
    with pytest.raises(ShutDownError):
        repeat(job.engines[0])


def test_an_observer_hears_of_repeated_calls(job):
    heard = []
    unsubscribe = job.engines[0].events.subscribe(heard.append)
    job.run(repeat)
    unsubscribe()
    names = [type(event).__name__ for event in heard]
    assert (names.count("Submitted"), names.count("Started")) == (4, 4)


def work(name="x"):
    """A work that is not in flight."""
    return Work(Request(name, Operation.ALLREDUCE, DType.UINT8, (1,)), None, None)


def test_a_work_is_admitted_only_where_it_need_not_wait():
    table = WorkTable(0, CommandQueue(InprocHub(1).channel(0)))
    first = work()
    assert table.admit(first)
    assert table.owns(first)
    assert not table.admit(work())
    assert table.take(first.request.key) is first
    failed = work()
    failed.fail(ValueError("wrong"))
    table.reject([failed], unnamed=False)
    assert not table.admit(work())
    assert table.admit(work("y"))
    table.close(ShutDownError("over"))
    assert not table.admit(work("z"))
