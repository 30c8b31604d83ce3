"""The tensors of a rank that may run without the coordinator, as the bypass sees them."""

from dataclasses import replace

import pytest

from collectives.api import Operation, Parameters, Request
from collectives.controller.messages import Ready, Response, Run, Unknown
from collectives.controller.schedules import Schedule
from collectives.controller.worker import Worker
from tests.collectives.controller.negotiation_simulation import (
    tensor,
)
from tests.collectives.controller.test_response_cache import Unseen

A, B, C = (tensor(name) for name in "abc")
RESPONSES = {id: Response(id, request) for id, request in enumerate((A, B, C), 1)}


@pytest.fixture
def worker():
    """One that has run a, b and c, which have the ids 1, 2 and 3, in one batch, the first."""
    worker = Worker(Parameters())
    for request in (A, B, C):
        worker.submit(request)
    worker.outgoing()
    worker.run(Run(((1, 2, 3),), tuple(RESPONSES.values())))
    return worker


def test_known_tensors_are_unreported_until_the_coordinator_hears_of_them(worker):
    assert not worker.unreported()
    worker.submit(B)
    worker.submit(A)
    assert [*worker.unreported()] == [2, 1]
    assert worker.outgoing() == Ready(ids=(2, 1))
    assert not worker.unreported()
    worker.submit(C)
    assert not worker.unreported()


def test_a_rank_with_other_news_has_no_unreported_tensors(worker):
    news = {
        "a new tensor": lambda worker: worker.submit(tensor("new")),
        "a changed tensor": lambda worker: worker.submit(tensor("b", (9,))),
        "a rejection": lambda worker: worker.reject(tensor("bad"), "wrong"),
        "an answer": lambda worker: worker.resend(Unknown((7,))),
    }
    for kind, happen in news.items():
        other = Worker(Parameters())
        other.submit(A)
        other.outgoing()
        other.run(Run(((1,),), (RESPONSES[1],)))
        other.submit(A)
        assert [*other.unreported()] == [1], kind
        happen(other)
        assert not other.unreported(), kind


def test_a_rejected_call_keeps_tensors_from_running_until_all_ranks_know(worker):
    worker.reject(tensor("bad"), "wrong")
    worker.outgoing()
    worker.submit(A)
    assert not worker.unreported()


def test_a_part_of_the_tensors_may_run_alone(worker):
    for request in (A, B, C):
        worker.submit(request, urgent=request is not B)
    worker.finish_schedule(Schedule(1, ((RESPONSES[3],), (RESPONSES[2],))))
    assert worker.next_batch == 3
    assert [*worker.unreported()] == [1]
    assert worker.outgoing() == Ready(ids=(1,), urgent_ids=(1,))
    assert not worker.is_idle


def test_nothing_is_left_of_tensors_that_all_ran(worker):
    for request in (A, B):
        worker.submit(request, urgent=True)
    worker.finish_schedule(Schedule(1, ((RESPONSES[1], RESPONSES[2]),)))
    assert worker.is_idle
    assert not worker.has_news
    worker.submit(B)
    assert [*worker.unreported()] == [2]


def test_a_rank_that_has_joined_has_no_unreported_tensors(worker):
    worker.submit(tensor("join", operation=Operation.JOIN))
    worker.outgoing()
    worker.submit(A)
    assert not worker.unreported()


def test_only_the_last_batch_of_a_message_begins_rounds(worker):
    batches = worker.run(Run(((1,), (2, 3)), begins_rounds=True, first=1))
    assert [batch.begins_rounds for batch in batches] == [False, True]
    assert [batch.begins_rounds for batch in worker.run(Run(((1,),), first=3))] == [False]


def test_a_tensor_that_got_a_new_id_is_known_when_the_old_one_is_forgotten(worker):
    changed = tensor("a", (9,))
    worker.submit(changed)
    worker.outgoing()
    worker.run(Run(((4,),), (Response(4, changed),), first=1))
    worker.run(Run(((2,),), forget=(1,), first=2))
    worker.submit(changed)
    assert [*worker.unreported()] == [4]


def test_there_is_a_schedule_only_if_a_caller_waits(worker):
    worker.submit(A)
    assert worker.schedule() is None
    worker.urge(A.key)
    assert worker.schedule().batches == ((RESPONSES[1],),)


def test_a_request_that_travels_whole_after_its_id_is_introduced_once_more(worker):
    assert worker.introduced[0] == 3
    worker.submit(A)
    worker.outgoing()
    worker.resend(Unknown((1,)))
    assert worker.introduced[0] == 4
    assert worker.outgoing().requests == (A,)


def test_a_request_that_is_abandoned_before_it_travels_again_is_not_introduced(worker):
    worker.submit(A)
    worker.outgoing()
    worker.resend(Unknown((1,)))
    assert worker.abandon(A.key) is not None
    assert worker.introduced[0] == 3
    assert worker.outgoing().requests == ()


def test_the_removal_of_a_set_forgets_its_names_without_a_look_at_the_others(worker):
    """A job with many names that adds and removes sets took a time that grows with both."""
    of_set = replace(tensor("d"), process_set=1)
    worker.run(Run(((4,),), (Response(4, of_set),)))
    worker._responses = Unseen(worker._responses)
    removal = Request("process_set.remove", Operation.REMOVE_PROCESS_SET, root_rank=1)
    worker.run(Run(((5,),), (Response(5, removal),)))
    assert 4 not in worker._responses
    assert 1 in worker._responses


# When ready tensors are released.


def test_a_rank_that_submits_nothing_says_nothing():
    assert Worker(Parameters()).outgoing() is None


def test_what_was_said_is_not_said_again():
    worker = Worker(Parameters())
    worker.submit(tensor())
    assert worker.outgoing() == Ready((tensor(),))
    assert worker.outgoing() is None
