"""Workers that leave: because they were asked to, were left behind, or lose their host."""

import re

import pytest
from driven import EXITED, KILLED, begun, elastic, published, report

from executors.api import WorkerError
from executors.failures import Failure, FailureKind


def test_a_worker_that_was_asked_to_end_is_left_out_and_its_end_is_no_failure(job, agents):
    driver = begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    report(job, agents, "worker-1", 0, kind="draining")
    world = published(job, 1)
    assert (world.planned, world.text) == (True, "rank 1 on host a left")
    report(job, agents, "worker-1", 1, kind="leaving")
    driver.failed("worker-1", EXITED)
    driver.done("worker-0")
    driver.done("worker-2")
    driver.check()
    assert driver.order == ("worker-0", "worker-2")


@pytest.mark.parametrize("failure", [KILLED, Failure(FailureKind.EXCEPTION, "raised", error=KeyError("x"))])
def test_one_that_fails_before_it_has_left_is_lost(job, agents, failure):
    driver = begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    report(job, agents, "worker-1", 0, kind="draining")
    driver.failed("worker-1", failure)
    assert not driver.is_over
    assert not published(job, 2).planned
    assert published(job, 2).text == f"rank 1 on host a lost ({failure.text})"
    report(job, agents, "worker-0", 1, kind="formed", round=2)
    driver.done("worker-0")
    driver.done("worker-2")
    driver.check()


def test_who_leaves_is_told_by_rank(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(2, most=3), job, agents, a=1, b=1)
    driver.found({"a": 1, "b": 2})
    report(job, agents, "worker-1", 0, kind="draining")
    report(job, agents, "worker-2", 0, kind="draining")
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "rank 1 on host b was asked to end",
        "worker-2 on host b was asked to end",
    ]


def test_the_end_of_a_newcomer_that_was_stopped_is_no_failure(job, agents):
    driver = begun(elastic(1, most=2, may_find_hosts=False), job, agents, a=1)
    driver.found({"a": 1, "b": 1})
    driver.found({"a": 1})
    assert agents.stopped == ["worker-1"]
    driver.failed("worker-1", Failure(FailureKind.EXCEPTION, "raised while it was ended"))
    driver.failed("worker-0", KILLED)
    agents.wait(1.0)
    with pytest.raises(WorkerError, match="last failure: worker-0") as caught:
        driver.check()
    assert caught.value.rank == 0


def test_the_end_of_one_that_the_others_have_left_behind_is_no_failure(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(2), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    report(job, agents, "worker-1", 0, kind="behind")
    assert published(job, 1).workers == (("worker-0", "a"),)
    assert list(agents.started) == ["worker-0", "worker-1", "worker-2"]
    driver.failed("worker-1", Failure(FailureKind.SHUT_DOWN, "ended with exit code 1", 1))
    assert caplog.messages == ["rank 1 on host a leaves: the other ranks are not in its call of elastic functions"]
    driver.done("worker-0")
    driver.check()
    assert driver.order == ("worker-0",)


def test_the_others_wait_for_another_where_they_are_too_few(job, agents):
    driver = begun(elastic(2, least=2), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    report(job, agents, "worker-1", 0, kind="behind")
    driver.failed("worker-1", Failure(FailureKind.SHUT_DOWN, "ended with exit code 1", 1))
    report(job, agents, "worker-2", 0, kind="ready")
    world = published(job, 1)
    assert world.workers == (("worker-0", "a"), ("worker-2", "a"))
    assert world.text == "rank 1 on host a left, rank 1 on host a joined"
    driver.done("worker-0")
    driver.done("worker-2")
    driver.check()
    assert driver.order == ("worker-0", "worker-2")


def test_a_host_that_is_no_longer_found_drains(job, agents):
    driver = begun(elastic(2), job, agents, a=1, b=1)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 1})
    assert published(job, 1).text == "rank 1 on host b left"


@pytest.mark.parametrize(
    ("least", "text", "planned"),
    [
        (1, "go on from the last commit", [True, False]),
        (2, "are too few to go on alone, and lose the host then", []),
    ],
)
def test_ranks_that_come_to_no_commit_before_their_host_is_gone(job, agents, caplog, least, text, planned):
    driver = begun(elastic(3, least=least), job, agents, a=1, b=2)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.leaves_in(60.0, "b")
    driver.found({"a": 1})
    driver.leaves_in(5.0, "b")
    agents.wait(3.9)
    assert not caplog.records
    agents.wait(0.1)
    [line] = caplog.messages
    assert re.sub(r"at \d\d:\d\d:\d\d", "at T", line) == (
        "rank 1, rank 2 on host b came to no commit since the notice that the host will be gone at T; the others "
        + text
    )
    assert [published(job, number + 1).planned for number in range(len(planned))] == planned
    driver.host_lost("b", "preempted")
    driver.failed("worker-1", KILLED)
    assert len(caplog.messages) == 1


def test_a_host_that_is_lost_takes_its_workers_with_it(job, agents):
    driver = begun(elastic(3), job, agents, a=1, b=2)
    driver.host_lost("b", "its agent was lost")
    world = published(job, 1)
    assert world.workers == (("worker-0", "a"),)
    assert world.text == "rank 1 on host b lost (its agent was lost), rank 2 on host b lost (its agent was lost)"
