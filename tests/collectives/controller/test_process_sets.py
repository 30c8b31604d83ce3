"""Process sets: their ids and ranks, and how they come and go."""

from dataclasses import replace

import pytest

from collectives.api import DType, InvalidRequestError, Operation, Request
from collectives.controller.process_sets import GLOBAL, ProcessSets
from tests.collectives.controller.negotiation_simulation import World, Wrong


def test_the_global_set_always_exists():
    sets = ProcessSets(3)
    assert (sets.size, sets.ids(), sets.ranks(GLOBAL)) == (3, [0], (0, 1, 2))


def test_ids_follow_the_order_and_ranks_are_sorted():
    sets = ProcessSets(4, [(3, 1), [0]])
    assert sets.ids() == [0, 1, 2]
    assert [sets.ranks(id) for id in sets.ids()] == [(0, 1, 2, 3), (1, 3), (0,)]
    assert sets.add([2, 0]) == 3
    assert sets.ranks(3) == (0, 2)


@pytest.mark.parametrize("ranks", [(), (0, 0), (-1,), (3,), (0, 1, 2, 3)])
def test_each_member_is_a_rank_named_once(ranks):
    with pytest.raises(InvalidRequestError, match=r"must name each rank once, out of 0\.\.2, and at least one"):
        ProcessSets(3, [ranks])


@pytest.mark.parametrize("ranks", [(0, 2), (2, 0), (0, 1, 2)])
def test_a_set_exists_once(ranks):
    sets = ProcessSets(3, [(0, 2)])
    with pytest.raises(InvalidRequestError, match="exists already"):
        sets.add(ranks)
    assert sets.ids() == [0, 1]


@pytest.mark.parametrize("id", [-1, 2, 100])
def test_an_unknown_id_is_answered_with_the_known_ones(id):
    with pytest.raises(InvalidRequestError, match=rf"process set {id} does not exist; known ids: \[0, 1\]"):
        ProcessSets(3, [(0, 2)]).ranks(id)


def test_in_a_world_of_one_the_global_set_is_the_only_one():
    with pytest.raises(InvalidRequestError, match="exists already"):
        ProcessSets(1, [(0,)])


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


def test_members_of_a_new_set_hear_what_each_of_them_offers():
    world = World(3)
    for rank in range(3):
        world.submit(replace(add(0, 2), offer=f"address of {rank}".encode()), rank)
    world.settle()
    ((response,),) = {batch.responses for batch in world.batches[1]}
    assert response.offers == (b"address of 0", b"address of 2")
