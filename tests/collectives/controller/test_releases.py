"""When the coordinator lets the ranks agree among themselves."""

from collectives.api import Operation, Parameters
from collectives.controller.coordinator import Coordinator
from collectives.controller.messages import Ready, Run
from collectives.controller.process_sets import ProcessSets
from tests.collectives.controller.test_negotiation import tensor

SIZE = 2


def coordinator_of(*sets):
    return Coordinator(ProcessSets(SIZE, sets), Parameters())


def begins(coordinator, *requests, ranks=range(SIZE)):
    """For each message that runs ``requests`` of all ``ranks``: whether it lets rounds begin."""
    for rank in ranks:
        coordinator.receive(rank, Ready(requests), 0.0)
    return [each.message.begins_rounds for each in coordinator.decide(0.0) if isinstance(each.message, Run)]


def test_a_decider_that_wants_rounds_gets_them_with_the_next_message_only():
    coordinator = coordinator_of()
    assert begins(coordinator, tensor("a")) == [False]
    coordinator.want_rounds()
    assert begins(coordinator, tensor("b")) == [True]
    assert begins(coordinator, tensor("c")) == [False]


def test_rounds_wait_until_no_other_tensor_is_submitted_in_part():
    coordinator = coordinator_of()
    coordinator.want_rounds()
    coordinator.receive(0, Ready((tensor("half"),)), 0.0)
    assert begins(coordinator, tensor("a")) == []
    coordinator.receive(0, Ready(urgent=(tensor("a").key,)), 0.0)
    assert [each.message.begins_rounds for each in coordinator.decide(0.0)] == [False]
    coordinator.receive(1, Ready((tensor("half"),)), 0.0)
    assert [each.message.begins_rounds for each in coordinator.decide(0.0)] == [True]


def test_rounds_wait_until_no_rank_has_joined():
    coordinator = coordinator_of()
    coordinator.want_rounds()
    coordinator.receive(1, Ready((tensor("join", operation=Operation.JOIN),)), 0.0)
    assert begins(coordinator, tensor("a"), ranks=[0]) == [False]


def test_rounds_do_not_begin_with_a_message_that_not_all_ranks_get():
    coordinator = coordinator_of((0,))
    coordinator.want_rounds()
    assert begins(coordinator, tensor("a", process_set=1), ranks=[0]) == [False]
    for rank, requests in ((0, (tensor("b"), tensor("c", process_set=1))), (1, (tensor("b"),))):
        coordinator.receive(rank, Ready(requests), 0.0)
    assert [each.message.begins_rounds for each in coordinator.decide(0.0)] == [False, False]
    assert begins(coordinator, tensor("d")) == [True]
