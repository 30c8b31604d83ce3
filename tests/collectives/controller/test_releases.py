"""When the coordinator sends ready tensors, and when it lets the ranks agree among themselves."""

import pytest

from collectives.api import Operation, Parameters
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Run
from collectives.controller.process_sets import ProcessSets
from collectives.controller.releases import REPETITIONS
from tests.collectives.controller.negotiation_simulation import (
    CYCLE,
    World,
    held,
    tensor,
)

SIZE = 2


def coordinator_of(*sets):
    return Coordinator(ProcessSets(SIZE, sets), Parameters())


def begins(coordinator, *requests, ranks=range(SIZE)):
    """For each message that runs ``requests`` of all ``ranks``: whether it lets rounds begin."""
    for rank in ranks:
        coordinator.receive(rank, Ready(requests), 0.0)
    return decided(coordinator)


def decided(coordinator):
    return [each.message.begins_rounds for each in coordinator.decide(0.0) if isinstance(each.message, Run)]


def again(coordinator, ranks=range(SIZE)):
    """As :func:`begins`, for the first tensor, which a caller of each rank waits for, by its number."""
    for rank in ranks:
        coordinator.receive(rank, Ready(ids=(1,), urgent_ids=(1,)), 0.0)
    return decided(coordinator)


def test_rounds_begin_where_callers_wait_for_the_same_tensor_again_and_again():
    coordinator = coordinator_of()
    assert begins(coordinator, tensor("a")) == [False]
    assert [again(coordinator) for _ in range(REPETITIONS)] == [[False]] * (REPETITIONS - 1) + [[True]]
    assert begins(coordinator, tensor("b")) == [False]
    assert again(coordinator) == [False]


def test_rounds_wait_until_no_other_tensor_is_submitted_in_part():
    coordinator = coordinator_of()
    begins(coordinator, tensor("a"))
    coordinator.receive(0, Ready((tensor("half"),)), 0.0)
    assert [again(coordinator) for _ in range(REPETITIONS)] == [[False]] * REPETITIONS
    coordinator.receive(1, Ready((tensor("half"),)), 0.0)
    assert decided(coordinator) == [False]
    assert [again(coordinator) for _ in range(REPETITIONS)][-1] == [True]


def test_rounds_wait_until_no_rank_has_joined():
    coordinator = coordinator_of()
    begins(coordinator, tensor("a"))
    for _ in range(REPETITIONS - 1):
        again(coordinator)
    coordinator.receive(1, Ready((tensor("join", operation=Operation.JOIN),)), 0.0)
    assert again(coordinator, ranks=[0]) == [False]


def test_rounds_do_not_begin_with_a_message_that_not_all_ranks_get():
    coordinator = coordinator_of((0,))
    begins(coordinator, tensor("a", process_set=1), ranks=[0])
    assert [again(coordinator, ranks=[0]) for _ in range(REPETITIONS + 1)] == [[False]] * (REPETITIONS + 1)


# When ready tensors are released.


def test_nothing_else_half_submitted_goes_out_at_once():
    world = World(2)
    world.submit(tensor())
    world.settle()
    assert world.coordinator.deadline is None
    assert world.ran(1) == [["a"]]


def test_a_patient_coordinator_holds_what_nobody_waits_for():
    world = World(2, patient=True)
    for name in "ab":
        world.submit(tensor(name))
        world.settle()
    assert not world.log
    assert world.coordinator.deadline == CYCLE
    world.wait()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


@pytest.mark.parametrize("late", [False, True])
def test_a_patient_coordinator_lets_nobody_wait(late):
    world = World(2, patient=True)
    world.submit(tensor("a"))
    world.settle()
    if late:
        world.workers[1].urge((0, "a"))
    else:
        world.submit(tensor("b"), urgent=True)
    world.settle()
    assert world.ran(0) == ([["a"]] if late else [["a", "b"]])


@pytest.mark.parametrize("threshold", [0, 32])
def test_a_patient_coordinator_sends_what_is_enough(threshold):
    world = World(2, patient=True, threshold=threshold)
    for name in "ab":
        world.submit(tensor(name))
    world.settle()
    assert [name for names in world.ran(0) for name in names] == ["a", "b"]


def test_a_ready_tensor_is_held_for_the_cycle_time_at_most():
    world = held()
    world.now = CYCLE - 0.01
    world.settle()
    assert not world.log
    world.now = CYCLE
    world.settle()
    assert world.ran(0) == [["a"]]
    assert world.coordinator.deadline is None


def test_the_first_ready_tensor_sets_the_deadline():
    world = held()
    world.now = 1.0
    world.submit(tensor("c"))
    world.settle()
    assert world.coordinator.deadline == CYCLE


def test_what_becomes_ready_meanwhile_shares_the_batch():
    world = held()
    world.submit(tensor("b"), 1)
    world.settle()
    assert world.ran(0) == world.ran(1) == [["a", "b"]]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_waiting_caller_ends_the_hold(cached, late):
    world = World(2)
    if cached:
        world.submit(tensor("a"))
        world.settle()
        world.log.clear()
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"), 0)
    world.submit(tensor("a"), 1, urgent=not late)
    world.settle()
    if late:
        assert not world.log
        world.workers[0].urge((0, "a"))
        world.settle()
    assert world.ran(0) == world.ran(1) == [["a"]]


def test_an_urgent_tensor_takes_the_held_ones_along():
    world = held()
    world.submit(tensor("c"), 0, urgent=True)
    world.settle()
    assert not world.log
    world.submit(tensor("c"), 1)
    world.settle()
    assert world.ran(0) == [["a", "c"]]


def test_what_was_urgent_once_is_not_the_next_time():
    world = held()
    for urgent in (True, False):
        world.log.clear()
        world.submit(tensor("c"), 0, urgent=urgent)
        world.submit(tensor("c"), 1)
        world.settle()
        assert bool(world.log) is urgent


def test_urging_what_is_over_changes_nothing():
    world = World(2)
    world.submit(tensor("a"))
    world.settle()
    world.workers[0].urge((0, "a"))
    world.sent()
    world.settle()
    assert not world.sent()


def test_an_urge_that_comes_too_late_does_not_cut_the_next_hold_short():
    world = World(2)
    world.submit(tensor("a"))
    for rank in (0, 1):
        world.flush(rank), world.rise(rank)
    world.decide()
    world.workers[0].urge((0, "a"))  # the coordinator has let "a" run, but rank 0 does not know yet
    world.settle()
    world.log.clear()
    world.submit(tensor("b"), 0)
    world.submit(tensor("c"))
    world.settle()
    assert not world.log
    world.wait()
    assert world.ran(0) == [["c"]]


def test_enough_bytes_end_the_hold():
    world = held(threshold=32)
    for name in "cde":
        world.submit(tensor(name))
        world.settle()
        assert world.ran(0) == ([["a", "c"], ["d", "e"]] if name == "e" else [["a", "c"]])


def test_without_fusion_nothing_is_held():
    world = World(2, threshold=0)
    world.submit(tensor("b"), 0)
    world.submit(tensor("a"))
    world.settle()
    assert world.ran(0) == [["a"]]
