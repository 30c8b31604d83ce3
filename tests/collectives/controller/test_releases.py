"""When the coordinator lets the ranks agree among themselves."""

from collectives.api import Operation, Parameters
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Run
from collectives.controller.process_sets import ProcessSets
from collectives.controller.releases import REPETITIONS
from tests.collectives.controller.test_negotiation import tensor

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
