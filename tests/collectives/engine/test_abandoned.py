"""Tensors that a rank does not want any more before the others have submitted them."""

import sys
import threading
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectives.api import DType, InvalidRequestError, MismatchError, Operation, RefusedCallError, Request
from collectives.buffers import as_buffer
from collectives.controller.messages import ABANDONED
from collectives.engine.work import Work
from tests.collectives.controller.hosted_simulation import HostedWorld
from tests.collectives.controller.negotiation_simulation import World
from tests.collectives.engine.job import PATIENCE, ones, outcome, run, running, total


def tensor(name, **fields):
    return Request(name, Operation.ALLREDUCE, DType.FLOAT32, (4,), **fields)


def group(name, length):
    return [tensor(f"{name}[{place}]", group=name, group_size=length) for place in range(length)]


def abandon(world, rank, requests):
    """The keys that end at once; the others get an answer."""
    ended = [refusal.key for each in requests if (refusal := world.workers[rank].abandon(each.key)) is not None]
    world.in_flight[rank].difference_update(ended)
    return ended


@pytest.mark.parametrize("is_known", [False, True])
def test_an_abandoned_tensor_ends_on_its_rank_alone(is_known):
    world, request = World(3), tensor("a")
    for _ in range(is_known):
        world.submit(request)
        world.settle()
    world.log.clear()
    world.submit(request, 0, 1)
    world.settle()
    assert abandon(world, 0, [request]) == []
    world.settle()
    assert world.refused(0) == [ABANDONED]
    world.submit(request, 2)
    world.settle()
    assert not any(world.ran(rank) for rank in range(3))
    world.submit(request, 0)
    world.settle()
    assert [world.ran(rank) for rank in range(3)] == [[["a"]]] * 3


def test_nobody_waits_for_a_tensor_that_all_have_abandoned():
    world, request = World(2), tensor("a")
    world.submit(request, 0)
    world.settle()
    abandon(world, 0, [request])
    world.settle()
    assert not world.coordinator.is_waiting
    assert world.workers[0].is_idle


def test_a_tensor_that_was_not_reported_ends_at_once():
    world, request = World(2), tensor("a")
    world.submit(request, 0)
    assert abandon(world, 0, [request]) == [request.key]
    assert not world.flush(0)


@pytest.mark.parametrize("is_known", [False, True])
def test_the_steps_to_abandon_a_group_grow_with_its_length(is_known):
    """And not with the square of it, or worse."""
    few, many = (steps_to_abandon(length, is_known) for length in (50, 200))
    assert many < 5 * few


def steps_to_abandon(length, is_known):
    """How many lines run, while the coordinator has heard of nothing; all tensors are waited for."""
    world, requests = World(1), group("g", length)
    for request in requests if is_known else ():
        world.submit(request)
    world.settle()
    for request in requests:
        world.submit(request, 0)
        world.workers[0].urge(request.key)
    steps = count()

    def trace(frame, event, argument):
        next(steps)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ended = abandon(world, 0, requests)
    finally:
        sys.settrace(before)
    assert len(ended) == length
    assert not world.flush(0)
    return next(steps)


def test_a_group_of_which_the_coordinator_knows_one_tensor_waits_for_its_answer():
    world, (first, second) = World(2), group("g", 2)
    world.submit(first, 0)
    world.flush(0)
    world.submit(second, 0)
    assert abandon(world, 0, [second, first]) == []
    world.settle()
    assert world.refused(0) == [ABANDONED, ABANDONED]
    assert world.workers[0].is_idle


def test_a_tensor_that_all_have_submitted_runs():
    world, request = World(2), tensor("a")
    world.submit(request)
    for rank in range(2):
        world.flush(rank)
        world.rise(rank)
    assert abandon(world, 0, [request]) == []
    world.settle()
    assert [world.ran(rank) for rank in range(2)] == [[["a"]]] * 2
    assert not world.refused(0)


def test_a_dropped_id_that_was_abandoned_is_abandoned():
    """The coordinator has dropped the id of the tensor when the rank submits it."""
    world, first = World(2, capacity=1), tensor("a")
    for request in (first, tensor("b")):
        world.submit(request)
        world.flush(0)
        world.settle()
    worker = world.workers[0]
    world.submit(first, 0)
    world.flush(0)
    abandon(world, 0, [first])
    world.settle()
    assert worker.is_idle
    assert not world.coordinator.is_waiting


@pytest.mark.parametrize("hosts", [(), ((0, 1),), ((0, 1), (2, 3))])
@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_what_a_rank_abandons_it_may_submit_again(hosts, chance):
    """In the end each call has run once on all ranks, with tensors that they wanted."""
    world = (
        HostedWorld(4, sets=((1, 2, 3),), capacity=3, hosts=hosts) if hosts else World(4, sets=((1, 2, 3),), capacity=3)
    )
    calls = [[tensor("a")], [tensor("b")], group("g", 2), [tensor("c", process_set=1)]]
    for _ in range(3):
        play(world, calls, chance)


def play(world, calls, chance):
    world.log.clear()
    rounds = {
        rank: [call for call in calls if rank in world.process_sets.ranks(call[0].process_set)] for rank in range(4)
    }
    for wanted in rounds.values():
        chance.shuffle(wanted)
    for _ in range(40):
        rank = chance.randrange(4)
        free = free_of(world, rank, rounds)
        if free and chance.random() < 0.5:
            rounds[rank].remove(free[0])
            for request in free[0]:
                world.submit(request, rank, urgent=chance.random() < 0.3)
        elif world.in_flight[rank] and chance.random() < 0.3:
            give_up(world, rank, chance, calls, rounds)
        for _ in range(chance.randrange(4)):
            chance.choice((world.flush, world.rise, world.fall))(chance.randrange(4))
        if chance.random() < 0.3:
            world.decide()
        again(world, rounds, calls)
    finish(world, rounds, calls)
    for rank in range(4):
        expected = [request.name for call in calls_of(world, rank, calls) for request in call]
        assert sorted(name for batch in world.ran(rank) for name in batch) == sorted(expected)
        assert world.workers[rank].is_idle
    assert not world.coordinator.is_waiting


def calls_of(world, rank, calls):
    return [call for call in calls if rank in world.process_sets.ranks(call[0].process_set)]


def free_of(world, rank, rounds):
    """The calls of which nothing is in flight."""
    return [call for call in rounds[rank] if not any(request.key in world.in_flight[rank] for request in call)]


def give_up(world, rank, chance, calls, rounds):
    call = chance.choice([call for call in calls if call[0].key in world.in_flight[rank]] or [[]])
    if abandon(world, rank, call) and call not in rounds[rank]:
        rounds[rank].append(call)


def again(world, rounds, calls):
    """Calls that were abandoned will be submitted again."""
    for rank, entries in world.log.items():
        refused = {entry[1] for entry in entries if entry[0] == "refuse"}
        world.log[rank] = [entry for entry in entries if entry[0] != "refuse"]
        rounds[rank] += [call for call in calls if call[0].key in refused and call not in rounds[rank]]


def finish(world, rounds, calls):
    for _ in range(8):
        world.wait()
        again(world, rounds, calls)
        for rank, waiting in rounds.items():
            for call in free_of(world, rank, rounds):
                waiting.remove(call)
                for request in call:
                    world.submit(request, rank, urgent=True)
    world.wait()


# On an engine.


@pytest.mark.parametrize("count", [1, 3])
def test_a_retry_has_the_values_of_the_retry(count):
    """Rank 0 submits 1, abandons it, and submits 5; the others submit 1 only then."""
    requests = group("g", count) if count > 1 else [tensor("a")]
    retried = threading.Barrier(3)

    def submit(engine, value):
        works = []
        for request in requests:
            buffer = as_buffer(np.full(4, value, np.float32))
            works.append(Work(request, buffer, buffer))
        engine.submit_group(works)
        return works

    def body(engine):
        if engine.topology.rank == 0:
            works = submit(engine, 1.0)
            engine.poll(works[0])
            engine.abandon(works)
            errors = [outcome(lambda work=work: engine.synchronize(work)) for work in works]
            assert all(isinstance(error, MismatchError) and ABANDONED in str(error) for error in errors)
        retried.wait(PATIENCE)
        sums = [engine.synchronize(work).owner[0] for work in submit(engine, 1.0 if engine.topology.rank else 5.0)]
        return sums, run(engine, ones(engine), "x")[0]

    with running(3) as job:
        for sums, after in job.run(body):
            assert sums == [7.0] * count
            assert after == total(3)[0]


def test_works_that_are_over_are_left_alone():
    def body(engine):
        buffer = as_buffer(np.ones(4, np.float32))
        work = engine.run(tensor("a"), buffer, buffer)
        engine.abandon([work])
        return run(engine, ones(engine), "x")[0]

    with running(2) as job:
        assert job.run(body) == [total(2)[0]] * 2


@pytest.mark.parametrize("count", [1, 3])
def test_a_work_that_waits_behind_a_call_that_failed_here_is_abandoned(count):
    """The other ranks make that call only when the work has ended; afterwards the name is free."""
    requests = group("g", count) if count > 1 else [tensor("a")]
    ended = threading.Barrier(2)

    def submit(engine):
        buffers = [as_buffer(np.ones(4, np.float32)) for _ in requests]
        works = [Work(request, buffer, buffer) for request, buffer in zip(requests, buffers, strict=True)]
        engine.submit_group(works)
        return works

    def body(engine):
        if engine.topology.rank == 0:
            engine.reject(requests, InvalidRequestError("a wrong argument"))
            works = submit(engine)
            engine.abandon(works)
            for work in works:
                assert ABANDONED in str(outcome(lambda work=work: engine.synchronize(work)))
        ended.wait(PATIENCE)
        if engine.topology.rank:
            for work in submit(engine):
                assert isinstance(outcome(lambda work=work: engine.synchronize(work)), RefusedCallError)
        return [engine.synchronize(work).owner[0] for work in submit(engine)]

    with running(2) as job:
        assert job.run(body) == [[2.0] * count] * 2


def test_a_work_without_a_name_is_not_abandoned():
    """Or its name would meet that of the next call of another rank."""
    abandoned = threading.Barrier(2)

    def body(engine):
        if engine.topology.rank:
            abandoned.wait(PATIENCE)
        buffer = as_buffer(np.ones(4, np.float32))
        work = engine.submit(tensor("allreduce"), buffer, buffer, unnamed=True)
        if not engine.topology.rank:
            engine.poll(work)
            engine.abandon([work])
            run(engine, ones(engine), "own", process_set=1)  # the coordinator has heard of it
            abandoned.wait(PATIENCE)
        return engine.synchronize(work).owner[0]

    with running(2, sets=((0,),)) as job:
        assert job.run(body) == [2.0] * 2
