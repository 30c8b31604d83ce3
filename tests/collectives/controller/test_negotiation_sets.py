"""Process sets that come and go, and hosts that speak for their ranks."""

from dataclasses import replace

import pytest

from collectives.api import DType, Operation, Parameters, Request
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Refuse, Run, Together, Unknown
from collectives.controller.process_sets import ProcessSets
from collectives.controller.releases import Outgoing
from tests.collectives.controller.negotiation_simulation import CYCLE, World, Wrong

TENSOR = Request("a", Operation.ALLREDUCE, DType.FLOAT32, (4,))


def add(*ranks):
    return Request("add", Operation.ADD_PROCESS_SET, splits=ranks)


def remove(id, *ranks):
    return Request("remove", Operation.REMOVE_PROCESS_SET, root_rank=id, splits=ranks)


def change(world, request):
    """Let all ranks ask for a change; the answer, the same on all."""
    world.log.clear()
    world.submit(request, *range(world.size))
    world.settle()
    (answer,) = {entry[1].sizes for rank in range(world.size) for entry in world.log[rank]}
    assert all(world.ran(rank) == [[request.name]] for rank in range(world.size))
    world.log.clear()
    return answer


def test_a_set_is_there_for_all_ranks_at_one_point_of_the_order():
    world = World(3)
    world.submit(add(1, 2), 0, 1)
    world.settle()
    assert not world.log
    world.submit(add(1, 2), 2)
    world.settle()
    assert [entry[1].sizes for entry in world.log[0]] == [(1,)]
    world.submit(replace(TENSOR, process_set=1), 1, 2)
    world.settle()
    assert world.ran(1) == world.ran(2) == [["add"], ["a"]]
    assert world.ran(0) == [["add"]]


def test_ids_are_used_again_in_the_order_they_were_freed():
    world = World(4)
    assert [change(world, add(*ranks)) for ranks in ((0, 1), (1, 2), (2, 3))] == [(1,), (2,), (3,)]
    for id, ranks in ((2, (1, 2)), (1, (0, 1))):
        change(world, remove(id, *ranks))
    assert [change(world, add(*ranks)) for ranks in ((0, 3), (1, 3), (0, 2))] == [(2,), (1,), (4,)]


def test_a_group_that_failed_in_a_removed_set_may_run_in_the_next_with_its_id():
    """Some tensors of the group had not come when its set was removed."""
    world = World(3, sets=((0, 1),))
    group = [replace(TENSOR, name=f"g[{at}]", process_set=1, group="g", group_size=2) for at in range(2)]
    for request in group:
        world.submit(Wrong(request, "a reason"), 0)
    world.submit(group[0], 1)
    world.settle()
    change(world, remove(1, 0, 1))
    assert change(world, add(0, 1)) == (1,)
    for request in group:
        world.submit(request)
    world.settle()
    assert [[name for batch in world.ran(rank) for name in batch] for rank in range(2)] == [["g[0]", "g[1]"]] * 2


def test_what_was_known_of_a_removed_set_is_not_known_of_the_next_with_its_id():
    world = World(3)
    change(world, add(0, 1))
    world.submit(replace(TENSOR, process_set=1), 0, 1)
    world.settle()
    change(world, remove(1, 0, 1))
    change(world, add(1, 2))
    world.submit(replace(TENSOR, process_set=1), 1, 2)
    world.settle()
    assert [world.ran(rank) for rank in range(3)] == [[], [["a"]], [["a"]]]


def test_what_is_in_flight_on_a_removed_set_fails_and_what_is_ready_runs():
    world = World(2, sets=((1,),), patient=True)
    half = replace(TENSOR, process_set=1, group="g", group_size=2)
    ready = replace(TENSOR, name="ready", process_set=1)
    world.submit(half, 1)
    world.submit(ready, 1)
    world.submit(remove(1, 1), 0, 1, urgent=True)
    world.settle()
    assert world.ran(1) == [["ready"], ["remove"]]
    assert world.refused(1) == ["process set 1 was removed while the tensor was in flight"]
    world.submit(ready, 1)
    world.settle()
    assert world.refused(1)[1:] == ["process set 1 has been removed"]


def test_what_was_meant_for_a_removed_set_is_not_taken_for_the_next_with_its_id():
    """The coordinator asks a rank to say in full what it sent as an id; the rank has heard of the removal by then."""
    world = World(3)
    change(world, add(0, 1))
    late = replace(TENSOR, process_set=1)
    world.submit(late, 0, 1)
    world.settle()
    world.submit(remove(1, 0, 1), 0, 1, 2)
    for step in (world.flush, world.rise):
        assert all(step(rank) for rank in range(3))
    world.decide()
    world.submit(late, 1)
    assert world.flush(1)
    assert world.rise(1)
    world.decide()
    assert all(world.fall(rank) for rank in range(3))
    change(world, add(1, 2))
    assert not world.coordinator.waiting()


@pytest.mark.parametrize("odd", [add(0), remove(1, 0)])
def test_ranks_that_want_different_sets_disagree(odd):
    world = World(2, sets=((0,),))
    world.submit(add(1), 0)
    world.submit(replace(odd, name="add"), 1)
    world.settle()
    assert world.refused(0) == world.refused(1)
    assert "tensor 'add': the ranks disagree about the " in world.refused(0)[0]
    assert change(world, add(1)) == (2,)


@pytest.mark.parametrize("request_", [add(0, 1), add(0), remove(7), remove(0)])
def test_what_no_set_can_be_is_refused(request_):
    world = World(2, sets=((0,),))
    world.submit(request_, 0, 1)
    world.settle()
    assert len(world.refused(0)) == 1
    assert world.refused(0) == world.refused(1)


# Hosts.


def known_id(coordinator, ranks, request=TENSOR):
    """Negotiate ``request`` and return the id it got."""
    for rank in ranks:
        coordinator.receive(rank, Ready((request,)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    return outgoing.message.batches[0][0]


def test_a_host_speaks_for_its_ranks():
    coordinator = Coordinator(ProcessSets(4), Parameters())
    id = known_id(coordinator, range(4))
    coordinator.receive(2, Together((2, 3), (id,)), 0.0)
    coordinator.receive(0, Ready(ids=(id,)), 0.0)
    assert coordinator.waiting()[0, "a"].submitted == (0, 2, 3)
    assert not coordinator.decide(0.0)
    coordinator.receive(1, Ready(ids=(id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1, 2, 3), Run(((id,),), first=1))]


def test_a_host_waits_for_its_ranks():
    coordinator = Coordinator(ProcessSets(2), Parameters(cycle_time=CYCLE, patient=True))
    id = known_id_of_patient(coordinator)
    coordinator.receive(0, Together((0, 1), (id,), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Run(((id,),), first=1))]
    coordinator.receive(0, Together((0, 1), (id,)), 0.0)
    assert not coordinator.decide(0.0)
    coordinator.receive(0, Together((0, 1), (), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Run(((id,),), begins_rounds=True, first=2))]


def known_id_of_patient(coordinator):
    for rank in range(2):
        coordinator.receive(rank, Ready((TENSOR,), urgent=(TENSOR.key,)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    return outgoing.message.batches[0][0]


def test_a_host_that_sends_what_was_dropped_is_asked_again():
    coordinator = Coordinator(ProcessSets(2), Parameters(cache_capacity=1))
    id = known_id(coordinator, range(2))
    known_id(coordinator, range(2), replace(TENSOR, name="b"))
    coordinator.receive(0, Together((0, 1), (id,)), 0.0)
    assert coordinator.decide(0.0) == [Outgoing((0, 1), Unknown((id,)))]


def test_a_rank_of_a_host_that_changed_its_mind():
    coordinator = Coordinator(ProcessSets(3), Parameters())
    id = known_id(coordinator, range(3))
    coordinator.receive(1, Together((1, 2), (id,)), 0.0)
    coordinator.receive(0, Ready((replace(TENSOR, shape=(5,)),)), 0.0)
    (outgoing,) = coordinator.decide(0.0)
    assert isinstance(outgoing.message, Refuse)
    assert "(5,) on rank 0; (4,) on ranks 1, 2" in outgoing.message.text
    assert sorted(outgoing.ranks) == [0, 1, 2]
