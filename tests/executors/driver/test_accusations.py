"""Ranks that others report as silent."""

import pytest
from driven import KILLED, begun, elastic, published, report

from executors.membership import Cooldown


def test_a_silent_rank_is_killed_after_a_moment(job, agents):
    begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(2,), text="rank 2 did not answer")
    assert agents.killed == []
    agents.wait(1.0)
    assert agents.killed == ["worker-2"]
    assert published(job, 1).text == "rank 2 on host a lost (no longer answered)"


def test_the_others_go_on_without_a_rank_that_cannot_be_in_any_world(job, agents):
    """It would be in each next one, too: the worlds of the job came and failed without an end."""
    begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="unable", round=0, text="rank 0 cannot connect: no file descriptor left")
    assert agents.killed == ["worker-0"]
    assert [name for name, _ in published(job, 1).workers] == ["worker-1", "worker-2"]
    assert "rank 0 on host a lost (could not connect: rank 0 cannot connect: no" in published(job, 1).text


def test_a_silent_rank_that_the_next_world_was_planned_with(job, agents):
    driver = begun(elastic(2, most=3), job, agents, a=2)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 3})
    report(job, agents, "worker-2", 0, kind="ready")
    assert published(job, 1).planned
    report(job, agents, "worker-1", 0, kind="failed", round=0, ranks=(0,), text="rank 0 did not answer")
    agents.wait(1.0)
    assert agents.killed == ["worker-0"]
    assert ([name for name, _ in published(job, 2).workers], published(job, 2).planned) == (
        ["worker-1", "worker-2"],
        False,
    )


def test_a_newcomer_ends_in_the_place_of_the_only_rank_with_the_state(job, agents):
    """That one is stopped for a while: without it the training would begin again."""
    driver = begun(elastic(1, most=2), job, agents, a=1)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 1, "b": 1})
    report(job, agents, "worker-1", 0, kind="ready")
    report(job, agents, "worker-1", 1, kind="failed", round=1, ranks=(0,), text="rank 0 did not answer")
    agents.wait(1.0)
    assert set(agents.killed) == {"worker-1"}
    assert published(job, 2).members == ("worker-0",)
    report(job, agents, "worker-0", 1, kind="formed", round=2)
    assert not driver.is_over


def test_a_report_about_a_world_that_the_ranks_have_left_by_plan_is_late(job, agents):
    driver = begun(elastic(2, most=3), job, agents, a=2)
    driver.found({"a": 3})
    report(job, agents, "worker-2", 0, kind="ready")
    report(job, agents, "worker-0", 0, kind="formed", round=1)
    report(job, agents, "worker-1", 0, kind="failed", round=0, ranks=(0,), text="rank 0 did not answer")
    agents.wait(1.0)
    assert agents.killed == []


def test_an_accuser_that_the_others_have_left_is_ended(job, agents):
    """It waits for a world without the rank that it blames, and the others go on with that rank."""
    driver = begun(elastic(2), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 1})
    report(job, agents, "worker-0", 1, kind="formed", round=1)
    report(job, agents, "worker-1", 0, kind="failed", round=0, ranks=(0,), text="rank 0 did not answer")
    agents.wait(1.0)
    assert agents.killed == ["worker-1"]
    driver.failed("worker-1", KILLED)
    assert not driver.is_over


def test_a_rank_that_leaves_is_not_done(job, agents):
    """The job grows again: worker-1 was asked to go on, but had left for the planned world before."""
    driver = begun(elastic(3, cooldown=Cooldown(1.0, 1.0)), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 1})
    driver.failed("worker-0", KILLED)
    report(job, agents, "worker-1", 0, kind="leaving")
    driver.done("worker-1")
    assert published(job, 3).text == "rank 0 on host a lost (was killed by signal 9), rank 1 on host a left"
    report(job, agents, "worker-2", 0, kind="formed", round=3)
    driver.found({"a": 3})
    agents.wait(3.0)
    assert {"worker-3", "worker-4"} <= set(agents.started)


def test_its_end_may_be_known_by_then(job, agents):
    driver = begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(2,), text="rank 2 is gone")
    driver.failed("worker-2", KILLED)
    agents.wait(1.0)
    assert agents.killed == []
    assert published(job, 1).text == "rank 2 on host a lost (was killed by signal 9)"


def test_a_world_that_failed_for_no_known_rank_is_made_again(job, agents):
    begun(elastic(2), job, agents)
    for worker in ("worker-0", "worker-1"):
        report(job, agents, worker, 0, kind="failed", round=0, text="the engine broke")
    agents.wait(1.0)
    assert published(job, 1).text == "the same ranks again"
    with pytest.raises(Exception, match="worlds/2"):
        published(job, 2)
