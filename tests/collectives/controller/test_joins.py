"""Ranks that have joined keep nobody waiting."""

import pytest

from collectives.api import DType, Operation, ReduceOp, Request
from collectives.controller.messages import Ready, Run
from collectives.controller.submissions import Pending
from collectives.controller.waits import Waiting
from tests.collectives.controller.negotiation_simulation import World

JOIN = Request("join", Operation.JOIN)


def tensor(name="a", rows=4, operation=Operation.ALLREDUCE, **fields):
    return Request(name, operation, DType.FLOAT32, (rows, 2), **fields)


@pytest.mark.parametrize("cached", [False, True])
def test_a_joined_rank_runs_what_the_others_submit(cached):
    world = World(3)
    if cached:
        world.submit(tensor())
        world.settle()
        world.log.clear()
    world.submit(JOIN, 1)
    world.settle()
    for _ in range(3):
        world.submit(tensor(), 0, 2)
        world.settle()
    assert [world.ran(rank) for rank in range(3)] == [[["a"]] * 3] * 3


def test_while_a_rank_has_joined_the_others_send_integers_too():
    world = World(3)
    world.submit(JOIN, 1)
    for step in range(3):
        world.sent()
        world.submit(tensor(), 0, 2)
        world.settle()
        ready = [message for _, message in world.traffic if isinstance(message, Ready)]
        assert step == 0 or not any(message.requests for message in ready)
    assert not any(message.responses for message in world.sent(Run))


def test_what_waited_for_a_rank_runs_when_it_joins():
    world = World(2)
    for name in "ab":
        world.submit(tensor(name), 0)
    world.settle()
    assert not world.log
    world.submit(JOIN, 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


def test_the_last_to_join_is_told_to_all_and_a_new_join_can_begin():
    world = World(3)
    for last in (2, 0):
        for rank in (1, 2 - last, last):
            assert not world.log
            world.submit(JOIN, rank)
            world.settle()
        for rank in range(3):
            (entry,) = world.log[rank]
            assert (entry[1].request.operation, entry[1].sizes) == (Operation.JOIN, (last,))
        world.log.clear()
    world.submit(tensor(), 0, 1)
    world.settle()
    assert not world.log


def test_what_is_half_submitted_comes_before_the_end_of_the_join():
    world = World(2)
    world.submit(tensor(), 0)
    world.submit(JOIN, 0)
    world.submit(JOIN, 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a"], ["join"]]


def test_a_join_of_one_process_set_says_nothing_about_another():
    world = World(3, sets=((0, 1),))
    world.submit(Request("join", Operation.JOIN, process_set=1), 1)
    world.submit(tensor(process_set=1), 0)
    world.submit(tensor(), 0, 2)
    world.settle()
    world.wait()
    assert world.ran(1) == [["a"]]
    assert world.coordinator.waiting()[0, "a"].missing == (1,)


def test_a_join_waits_for_silent_ranks_only():
    world = World(3)
    world.submit(JOIN, 0)
    for world.now in (100.0, 200.0):
        world.submit(tensor(), 1, 2)
        world.settle()
    assert world.coordinator.waiting()[0, "join"] == Waiting(200.0, (1, 2), (0,), silent=True)
    world.now = 300.0
    world.submit(tensor(), 2)
    world.settle()
    waiting = world.coordinator.waiting()
    assert waiting[0, "a"] == Waiting(300.0, (1,), (2,))
    assert waiting[0, "join"] == Waiting(200.0, (1,), (0,), silent=True)


def test_the_next_join_knows_nothing_of_the_last():
    world = World(2)
    for world.now in (100.0, 200.0):
        world.submit(JOIN, 0)
        world.settle()
        assert world.coordinator.waiting()[0, "join"] == Waiting(world.now, (1,), (0,), silent=True)
        world.submit(JOIN, 1)
        world.settle()
        assert not world.coordinator.waiting()


def step_of_gathers(world, *ranks):
    """One step of an allgather and an alltoall on ``ranks``; the sizes that rank 1 is told."""
    for rank in ranks:
        world.submit(tensor("g", rank + 1, Operation.ALLGATHER), rank)
        world.submit(tensor("x", 4, Operation.ALLTOALL, splits=(1, 0, rank)), rank)
    world.settle()
    sizes = {response.request.name: response.sizes for entry in world.log[1] for response in entry[1:]}
    world.log.clear()
    return sizes


def test_a_joined_rank_brings_no_rows():
    world = World(3)
    everybody = {"g": (1, 2, 3), "x": (1, 0, 0, 1, 0, 1, 1, 0, 2)}
    for _ in range(2):
        assert step_of_gathers(world, 0, 1, 2) == everybody
        world.submit(JOIN, 1)
        for _ in range(2):
            assert step_of_gathers(world, 0, 2) == {"g": (1, 0, 3), "x": (1, 0, 0, 0, 0, 0, 1, 0, 2)}
        world.submit(JOIN, 0, 2)
        world.settle()
        world.log.clear()


def test_a_broadcast_from_a_joined_root_is_refused():
    world = World(2)
    world.submit(JOIN, 1)
    world.submit(tensor(operation=Operation.BROADCAST, root_rank=1), 0)
    world.settle()
    assert "the root, rank 1, has joined" in world.refused(0)[0]
    assert not world.refused(1)
    world.submit(tensor(operation=Operation.BROADCAST, root_rank=0), 0)
    world.settle()
    assert world.ran(1) == [["a"]]


def test_what_a_joined_rank_costs_does_not_grow_with_the_square_of_the_ranks(monkeypatch):
    looks, submitted = [], Pending.submitted
    monkeypatch.setattr(Pending, "submitted", lambda self: looks.append(self) or submitted(self))
    world = World(16)
    world.submit(JOIN, 0)
    world.submit(tensor(), *range(1, 16))
    world.settle()
    assert world.ran(0) == [["a"]]
    assert len(looks) <= 2


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_a_scaled_extreme_is_not_defined_for_joined_ranks(op):
    world = World(2)
    world.submit(JOIN, 1)
    world.submit(tensor(op=op, prescale_factor=-1.0), 0)
    world.settle()
    assert f"op {op.name.capitalize()} with a prescale factor" in world.refused(0)[0]
