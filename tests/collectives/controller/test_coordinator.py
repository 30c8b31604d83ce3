"""The rules of the coordinator, without clock, socket or thread."""

from dataclasses import replace

import pytest

from collectives.api import DType, EngineError, Operation, Parameters, ReduceOp
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Leave, Left, Ready, Refuse, Run, Stop, Unknown
from collectives.controller.process_sets import ProcessSets
from collectives.controller.waits import Waiting
from tests.collectives.controller.negotiation_simulation import (
    World,
    held,
    runs_of_set,
    tensor,
)

# Readiness.


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_tensor_runs_once_when_the_last_member_has_it(size):
    world = World(size)
    for rank in range(size):
        assert not world.log
        world.submit(tensor(), rank)
        world.settle()
    assert [world.ran(rank) for rank in range(size)] == [[["a"]]] * size


def test_ranks_that_submit_in_different_orders_run_in_one_order():
    world = World(3, threshold=0)
    for rank, names in enumerate(("abc", "cab", "bca")):
        for name in names:
            world.submit(tensor(name), rank)
    world.settle()
    assert world.ran(0) == world.ran(1) == world.ran(2)
    assert sorted(world.ran(0)) == [["a"], ["b"], ["c"]]


def test_the_same_name_in_two_process_sets_is_two_tensors():
    world = World(3, sets=((0, 1), (1, 2)))
    for process_set in (0, 1, 2):
        world.submit(tensor(shape=(process_set + 1,), process_set=process_set))
    world.settle()
    assert [runs_of_set(world, 1, {process_set}) for process_set in (0, 1, 2)] == [
        [((0, "a"),)],
        [((1, "a"),)],
        [((2, "a"),)],
    ]
    assert not runs_of_set(world, 0, {2})
    assert not runs_of_set(world, 2, {1})


def test_overlapping_sets_run_in_one_order_on_the_ranks_they_share():
    world = World(4, sets=((0, 1, 2), (1, 2, 3), (1, 2)))
    for rank, order in ((1, (1, 2, 3)), (2, (3, 2, 1)), (0, (1,)), (3, (2,))):
        for process_set in order:
            world.submit(tensor(process_set=process_set), rank)
    world.settle()
    shared = {1, 2, 3}
    assert runs_of_set(world, 1, shared) == runs_of_set(world, 2, shared)
    assert len(runs_of_set(world, 1, shared)) == 3


def test_what_is_missing_is_known_by_name_and_rank():
    coordinator = Coordinator(ProcessSets(3, [(1, 2)]), Parameters())
    coordinator.receive(1, Ready((tensor("a"), tensor("b", process_set=1))), 0.0)
    coordinator.receive(0, Ready((tensor("a"),)), 0.0)
    assert coordinator.waiting() == {(0, "a"): Waiting(0.0, (2,), (0, 1)), (1, "b"): Waiting(0.0, (2,), (1,))}


# Disagreement.

ASPECTS = {
    "operation": (tensor(), tensor(operation=Operation.BARRIER)),
    "device": (tensor(), tensor(device="cuda")),
    "dtype": (tensor(), replace(tensor(), dtype=DType.INT64)),
    "shape": (tensor(), tensor(shape=(2, 2))),
    "op": (tensor(), tensor(op=ReduceOp.MAX)),
    "prescale factor": (tensor(), tensor(prescale_factor=0.5)),
    "postscale factor": (tensor(), tensor(postscale_factor=2.0)),
    "tag": (tensor(tag=3), tensor(tag=4)),
    "root rank": tuple(tensor(operation=Operation.BROADCAST, root_rank=root) for root in (0, 1)),
}


@pytest.mark.parametrize("aspect", ASPECTS)
@pytest.mark.parametrize("cached", [False, True])
def test_a_disagreement_is_one_text_on_all_members_and_disturbs_nothing(aspect, cached):
    usual, odd = ASPECTS[aspect]
    world = World(4, sets=((0, 2, 3),))
    usual, odd = replace(usual, process_set=1), replace(odd, process_set=1)
    other = tensor("other")
    if cached:
        world.submit(usual)
        world.settle()
    world.submit(other, 0, 1, 2)
    world.submit(usual, 0, 3)
    world.submit(odd, 2)
    world.settle()
    assert world.refused(0) == world.refused(2) == world.refused(3)
    assert not world.refused(1)
    (text,) = world.refused(0)
    assert f"tensor 'a': the ranks disagree about the {aspect}: " in text
    assert "on ranks 0, 3; " in text
    assert " on rank 2. " in text

    world.log.clear()
    world.submit(other, 3)
    world.submit(odd)
    world.settle()
    assert sorted(world.ran(0)) == [["a"], ["other"]]
    assert not any(world.refused(rank) for rank in range(4))


def test_after_a_disagreement_the_old_parameters_work_again():
    world = World(2)
    usual, odd = tensor(), tensor(shape=(9,))
    for requests in ((usual, usual), (usual, odd), (usual, usual), (usual, usual)):
        world.sent()
        for rank, request in enumerate(requests):
            world.submit(request, rank)
        world.settle()
    assert world.ran(0) == world.ran(1) == [["a"]] * 3
    assert len(world.refused(0)) == len(world.refused(1)) == 1
    assert all(not message.requests for message in world.sent(Ready))


# When ready tensors are released.


# The end.


def test_leaving_runs_what_is_ready_and_then_stops_everybody():
    world = held()
    for rank, cause in ((1, "raised ValueError"), (0, "raised ShutDownError")):
        world.coordinator.receive(rank, Leave(cause), world.now)
    world.submit(tensor("b"), 1)
    world.settle()
    for rank in (0, 1):
        assert [entry[0] for entry in world.log[rank]] == ["run", "Stop"]
    assert world.ran(0) == [["a"]]
    assert world.sent(Stop) == [Stop(1, cause="raised ValueError")] * 2
    world.submit(tensor("late"))
    world.settle()
    world.wait()
    assert world.ran(0) == [["a"]]


def test_everybody_has_left_when_the_last_one_has():
    world = World(3)
    world.coordinator.receive(2, Leave(), 0.0)
    world.settle()
    for rank in range(3):
        assert not world.sent(Left)
        world.coordinator.receive(rank, Left(), 0.0)
        world.settle()
    assert world.sent(Left) == [Left()] * 3


@pytest.mark.parametrize("message", [Run(()), Refuse(0, "a", "text"), Unknown((1,)), Stop(1)])
def test_what_only_a_coordinator_may_send_is_refused(message):
    with pytest.raises(EngineError, match="rank 1 sent"):
        World(2).coordinator.receive(1, message, 0.0)
