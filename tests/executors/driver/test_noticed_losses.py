"""Losses that other ranks notice: those of a host notice the end of a process before its agent does."""

import pytest
from driven import EXITED, KILLED, begun, elastic, published, report

from executors.api import WorkerError
from executors.failures import Failure, FailureKind
from executors.membership import Cooldown


def lose(job, agents, *ranks, worker="worker-0", round=0):
    report(job, agents, worker, round, kind="lost", round=round, ranks=ranks, text="gone")


def test_the_others_go_on_at_once_and_the_line_waits_for_the_reason(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(3), job, agents)
    lose(job, agents, 2)
    assert published(job, 1).workers == (("worker-0", "a"), ("worker-1", "a"))
    report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
    assert not caplog.messages
    driver.failed("worker-2", KILLED)
    assert caplog.messages == [
        "world 1: 2 ranks, rank 2 on host a lost (was killed by signal 9), resumed after 0.02 s, 0 steps lost"
    ]
    assert not agents.killed


@pytest.mark.parametrize("is_noticed_first", [True, False])
def test_one_that_ends_with_exit_code_0_is_done_whoever_notices_it_first(job, agents, caplog, is_noticed_first):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(3, cooldown=Cooldown(1.0, 1.0)), job, agents)
    report(job, agents, "worker-1", 0, kind="formed", round=0)
    if is_noticed_first:
        lose(job, agents, 2)
        report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
        driver.done("worker-2")
    else:
        driver.done("worker-2")
        report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "world 1: 2 ranks, rank 2 on host a ended with exit code 0, resumed after 0.02 s, 0 steps lost")
    ]
    agents.wait(10.0)
    assert list(agents.started) == ["worker-0", "worker-1", "worker-2"], "nobody comes for it"
    driver.done("worker-0")
    driver.done("worker-1")
    driver.check()


def test_a_report_of_an_earlier_world_names_no_rank_of_the_present_one(job, agents):
    driver = begun(elastic(3), job, agents)
    lose(job, agents, 0, worker="worker-1")
    assert driver.members == ("worker-1", "worker-2")
    lose(job, agents, 0, worker="worker-2")
    assert driver.members == ("worker-1", "worker-2")


def test_a_job_waits_for_the_reason_before_it_ends(job, agents):
    """The other ranks notice the end of a process sooner than its agent, whether it was done or not."""
    driver = begun(elastic(2), job, agents)
    lose(job, agents, 1)
    driver.done("worker-0")
    assert not driver.is_over
    driver.done("worker-1")
    driver.check()


@pytest.mark.parametrize("is_late", [True, False])
def test_the_reason_is_that_of_the_job_if_nobody_is_left(job, agents, is_late):
    driver = begun(elastic(2), job, agents)
    lose(job, agents, 1)
    if is_late:
        report(job, agents, "worker-0", 1, kind="formed", round=0)
        agents.wait(5.0)
    driver.done("worker-0")
    driver.failed("worker-1", EXITED)
    with pytest.raises(WorkerError, match="rank 1 on a ended with exit code 3") as caught:
        driver.check()
    assert caught.value.exit_code == 3


def test_one_whose_process_does_not_end_is_killed(job, agents):
    driver = begun(elastic(2), job, agents)
    lose(job, agents, 1)
    driver.done("worker-0")
    agents.wait(60.0)
    assert agents.killed == ["worker-1"]
    with pytest.raises(WorkerError, match="rank 1 on a ended for the others, but not its process"):
        driver.check()


def test_one_whose_host_is_lost_meanwhile_is_lost(job, agents):
    driver = begun(elastic(2), job, agents, a=1, b=1)
    lose(job, agents, 1)
    driver.done("worker-0")
    driver.host_lost("b", "its agent has ended")
    with pytest.raises(WorkerError, match=r"rank 1 on b was lost \(its agent has ended\)"):
        driver.check()


def test_the_line_does_not_wait_for_ever(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    begun(elastic(3), job, agents)
    lose(job, agents, 2)
    report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
    agents.wait(1.0)
    assert "rank 2 on host a lost (ended), resumed" in caplog.messages[-1]


def test_workers_hear_that_a_driver_closes_early(job, agents):
    driver = begun(elastic(3), job, agents)
    driver.close()
    assert published(job, 1).is_over


def test_a_driver_that_closes_when_the_job_is_over_says_nothing_more(job, agents):
    driver = begun(elastic(1), job, agents)
    driver.done("worker-0")
    driver.close()
    assert published(job, 1).text == "the job is done"
    with pytest.raises(Exception, match="worlds/2"):
        published(job, 2)


def test_a_driver_that_closes_tells_all(job, agents, caplog):
    caplog.set_level("INFO", "executors")
    driver = begun(elastic(3), job, agents)
    lose(job, agents, 2)
    report(job, agents, "worker-0", 1, kind="formed", round=1)
    driver.close()
    assert "world 1: 2 ranks" in caplog.messages[-1]


def test_a_second_report_and_one_of_an_earlier_world_change_nothing(job, agents):
    driver = begun(elastic(3), job, agents)
    lose(job, agents, 2)
    lose(job, agents, 2, worker="worker-1")
    driver.failed("worker-2", KILLED)
    with pytest.raises(Exception, match="worlds/2"):
        published(job, 2)


@pytest.mark.parametrize("limits", [{"least": 3, "may_find_hosts": False}, {"resets": 0}, {"failures": 0}])
def test_a_job_that_may_end_waits_for_the_reason(job, agents, limits):
    driver = begun(elastic(3, **limits), job, agents)
    lose(job, agents, 2)
    with pytest.raises(Exception, match="worlds/1"):
        published(job, 1)
    driver.failed("worker-2", KILLED)
    agents.wait(1.0)
    with pytest.raises(WorkerError, match="killed by signal 9"):
        driver.check()


def test_a_later_end_of_the_job_has_the_reason(job, agents):
    driver = begun(elastic(2, may_find_hosts=False), job, agents)
    lose(job, agents, 1)
    driver.failed("worker-1", EXITED)
    driver.failed("worker-0", KILLED)
    agents.wait(1.0)
    with pytest.raises(WorkerError) as caught:
        driver.check()
    assert caught.value.exit_code == -9


def test_an_exception_of_the_user_still_ends_the_job(job, agents):
    driver = begun(elastic(3), job, agents)
    lose(job, agents, 2)
    driver.failed("worker-2", Failure(FailureKind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
    assert agents.ended == ["worker-2"]
    with pytest.raises(WorkerError, match="rank 2 on a ended with exit code 1"):
        driver.check()
