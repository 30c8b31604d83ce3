"""The worlds that a driver publishes, and the reports that it takes."""

import json

import pytest
from driven import EXITED, KILLED, begun, elastic, published, report

from executors.job.environment import Course
from executors.job.worlds import CALL, Published, Report, report_key


def test_the_first_world_is_known_when_its_workers_start(job, agents):
    begun(elastic(2), job, agents)
    assert published(job, 0) == Published(
        0, (("worker-0", "a"), ("worker-1", "a")), False, "rank 0 on host a joined, rank 1 on host a joined"
    )
    names = ("HOROVOD_ELASTIC", "HOROVOD_WORKER_ID", "HOROVOD_ROUND", "HOROVOD_NEWCOMER", "HOROVOD_RANK")
    assert [agents.started["worker-1"][name] for name in names] == ["1", "worker-1", "0", "0", "1"]


def test_survivors_go_on_and_hear_why(job, agents):
    driver = begun(elastic(3), job, agents)
    driver.failed("worker-1", KILLED)
    world = published(job, 1)
    assert (world.workers, world.planned) == ((("worker-0", "a"), ("worker-2", "a")), False)
    assert world.text == "rank 1 on host a lost (was killed by signal 9)"
    driver.check()
    assert not driver.is_over


def test_a_newcomer_gets_the_place_that_it_would_have_now(job, agents):
    driver = begun(elastic(1, most=3), job, agents, a=1)
    driver.found({"a": 1, "b": 2})
    first = agents.started["worker-1"]
    assert (first["HOROVOD_RANK"], first["HOROVOD_SIZE"], first["HOROVOD_NEWCOMER"]) == ("1", "2", "1")
    courses = [Course.of(agents.started[worker]) for worker in ("worker-0", "worker-1")]
    assert [course.requested is None for course in courses] == [False, True]  # the job was not, for a newcomer
    assert job.course.requested <= courses[0].placed + 1.0
    assert first["HOROVOD_ROUND"] == "0"


def test_newcomers_that_are_ready_come_in_by_one_planned_change(job, agents):
    driver = begun(elastic(1, most=3), job, agents, a=1)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 3})
    report(job, agents, "worker-1", 0, kind="ready")
    with pytest.raises(Exception, match="worlds/1"):
        published(job, 1)
    report(job, agents, "worker-2", 0, kind="ready")
    world = published(job, 1)
    assert ([worker for worker, _ in world.workers], world.planned) == (["worker-0", "worker-1", "worker-2"], True)


def test_the_line_of_a_change_comes_when_it_is_over(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(3), job, agents)
    driver.failed("worker-2", KILLED)
    report(job, agents, "worker-0", 0, kind="formed", round=1, pause=0.123, lost=0)
    assert caplog.messages[-1] == (
        "world 1: 2 ranks, rank 2 on host a lost (was killed by signal 9), resumed after 0.12 s, 0 steps lost"
    )


def test_newcomers_can_read_in_which_call_the_ranks_are(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    begun(elastic(2), job, agents)
    for number, call in enumerate((1, 3, 2)):
        report(job, agents, "worker-0", number, kind="formed", round=0, call=call)
    assert job.store.get(CALL, 0.0) == b"3"
    assert not caplog.messages


@pytest.mark.parametrize(
    ("reports", "present"),
    [
        ([("formed", 0, 1), ("returned", 0, 1)], b"1 returned"),
        ([("returned", 0, 1), ("formed", 0, 1)], b"1 returned"),
        ([("formed", 0, 1), ("formed", 0, 2), ("returned", 0, 1)], b"2"),
        ([("formed", 0, 1), ("returned", 0, 1), ("formed", 1, 1)], b"1"),
        ([("formed", 0, 1), ("returned", 0, 1), ("failed", 0, 2)], b"2"),
        ([("formed", 0, 1), ("returned", 0, 1), ("failed", 1, 1)], b"1 returned"),
    ],
    ids=["after it", "in the other order", "late", "others go on", "lost before it formed", "lost after it"],
)
def test_newcomers_can_read_that_the_ranks_are_between_two_calls(job, agents, reports, present):
    begun(elastic(2), job, agents)
    for number, (kind, round, call) in enumerate(reports):
        report(job, agents, "worker-0", number, kind=kind, round=round, call=call)
    assert job.store.get(CALL, 0.0) == present


def test_a_world_that_begins_another_call_is_told_once(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(3), job, agents)
    driver.failed("worker-2", KILLED)
    for call in (1, 2):
        report(job, agents, "worker-0", call, kind="formed", round=1, call=call)
    assert len(caplog.messages) == 1


def test_reports_are_taken_out_of_the_store(job, agents):
    begun(elastic(2), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    with pytest.raises(Exception, match="reports/worker-0/0"):
        job.store.get(report_key("worker-0", 0), 0.0)


@pytest.mark.parametrize("is_taken_between", [False, True])
def test_a_report_that_is_sent_again_counts_once(job, agents, caplog, is_taken_between):
    """A client sends it again when the answer is lost with a connection."""
    caplog.set_level("INFO", "executors.driver.driver")
    begun(elastic(2), job, agents)
    for _ in range(2):
        job.store.set(report_key("worker-1", 0), Report("draining").encode())
        if is_taken_between:
            agents.call()
    agents.call()
    assert len(caplog.records) == 1
    assert job.store.peek(report_key("worker-1", 0)) is None


def test_a_report_of_a_stranger_or_of_an_unknown_kind_changes_nothing(job, agents):
    begun(elastic(2), job, agents)
    report(job, agents, "worker-9", 0, kind="draining")
    report(job, agents, "worker-0", 0, kind="singing")
    with pytest.raises(Exception, match="worlds/1"):
        published(job, 1)


def test_losses_before_a_world_has_formed_are_told_together(job, agents):
    driver = begun(elastic(4), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.failed("worker-3", KILLED)
    driver.failed("worker-1", EXITED)
    assert published(job, 2).text == (
        "rank 1 on host a lost (ended with exit code 3), rank 3 on host a lost (was killed by signal 9)"
    )


def test_an_error_of_the_driver_itself_is_not_hidden(job, agents, monkeypatch):
    begun(elastic(2), job, agents)
    monkeypatch.setattr("executors.driver.driver.WorldFormed", lambda round: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        report(job, agents, "worker-0", 0, kind="formed", round=0)


def test_published_worlds_and_reports_are_json():
    world = Published(3, (("worker-1", "a"),), True, "text")
    assert Published.decode(world.encode()) == world
    assert json.loads(Report("ready").encode())["kind"] == "ready"
