"""All of a group run, or none."""

from dataclasses import replace

import pytest

from collectives.api import DType, Operation, Request
from tests.collectives.controller.negotiation_simulation import World


def group(label, *names, **fields):
    shapes = fields.pop("shapes", {})
    return [
        Request(
            name,
            Operation.ALLREDUCE,
            DType.FLOAT32,
            shapes.get(name, (4,)),
            group=label,
            group_size=len(names),
            **fields,
        )
        for name in names
    ]


def submit(world, requests, *ranks, **kwargs):
    for request in requests:
        world.submit(request, *ranks, **kwargs)


@pytest.mark.parametrize("cached", [False, True])
def test_a_group_runs_when_all_of_it_is_ready(cached):
    world = World(2)
    requests = group("g", "a", "b")
    if cached:
        submit(world, requests)
        world.settle()
        world.log.clear()
    submit(world, requests, 0)
    world.submit(requests[0], 1)
    world.settle()
    world.wait()
    assert not world.log
    world.submit(requests[1], 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


def test_who_waits_for_one_of_a_group_gets_all_of_it_at_once():
    world = World(2, patient=True)
    first, second = group("g", "a", "b")
    world.submit(first, urgent=True)
    world.settle()
    world.submit(second)
    world.settle()
    assert world.ran(0) == [["a", "b"]]


def test_two_groups_with_one_label_follow_each_other():
    world = World(2)
    for _ in range(2):
        submit(world, group("g", "a", "b"))
        world.settle()
    assert world.ran(0) == [["a", "b"]] * 2


@pytest.mark.parametrize("order", ["abc", "bca", "cab"])
@pytest.mark.parametrize("cached", [False, True])
def test_a_group_fails_as_a_whole_and_disturbs_nothing_else(order, cached):
    world = World(2)
    if cached:
        submit(world, group("g", *"abc"))
        world.settle()
        world.log.clear()
    submit(world, group("g", *order), 0)
    submit(world, group("g", *"abc", shapes={"b": (5,)}), 1)
    world.submit(group("other", "x")[0])
    world.settle()
    texts = world.refused(0)
    assert len(texts) == 3
    assert len(set(texts)) == 1
    assert "tensor 'b': the ranks disagree about the shape" in texts[0]
    assert world.refused(1) == texts
    assert world.ran(0) == world.ran(1) == [["x"]]
    world.log.clear()
    for _ in range(2):
        submit(world, group("g", *"abc"))
        world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b", "c"]] * 2
    assert not world.refused(0)


def test_tensors_of_a_failed_group_that_arrive_late_fail_too():
    """A host may pass on the tensors of its ranks one by one."""
    world = World(2)
    submit(world, group("g", "a", "b"), 0)
    first, second = group("g", "a", "b", shapes={"a": (9,)})
    world.submit(first, 1)
    world.settle()
    assert (len(world.refused(0)), len(world.refused(1))) == (2, 1)
    world.submit(second, 1)
    world.settle()
    assert len(world.refused(1)) == 2
    world.log.clear()
    submit(world, group("g", "a", "b"))
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


@pytest.mark.parametrize(
    ("odd", "aspect"),
    [(group("h", "a", "b"), "group"), (group("g", "a"), "number of tensors in the group")],
)
def test_ranks_that_group_differently_disagree(odd, aspect):
    world = World(2)
    submit(world, group("g", "a", "b"), 0)
    submit(world, odd, 1)
    world.settle()
    assert len(world.refused(0)) == 2
    assert f"tensor 'a': the ranks disagree about the {aspect}: " in world.refused(0)[0]
    assert world.refused(1) == world.refused(0)[: len(odd)]
    world.log.clear()
    submit(world, group("g", "a", "b"))
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


def test_a_name_may_leave_its_group():
    world = World(2)
    submit(world, group("g", "a", "b"))
    world.settle()
    world.submit(replace(group("", "a")[0], group_size=0))
    world.settle()
    assert world.ran(0) == [["a", "b"], ["a"]]
