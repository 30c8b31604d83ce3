"""How an elastic job ends."""

from dataclasses import replace

import pytest
from driven import EXITED, KILLED, LOST, RAISED, begun, elastic, published, report

from executors.api import ExecutorError, WorkerError
from executors.driver.driver import Driver
from executors.failures import Failure, FailureKind
from executors.membership import Cooldown


def test_an_exception_of_the_user_ends_an_elastic_job_at_once(job, agents):
    driver = begun(elastic(3), job, agents)
    driver.failed("worker-1", Failure(FailureKind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
    assert agents.ended == ["worker-1"]
    assert published(job, 1).is_over
    with pytest.raises(WorkerError, match="rank 1 on a ended with exit code 1"):
        driver.check()


def test_too_many_resets(job, agents):
    driver = begun(elastic(3, resets=1), job, agents)
    driver.failed("worker-1", KILLED)
    driver.failed("worker-2", EXITED)
    agents.wait(1.0)
    assert agents.ended == ["worker-1"]
    with pytest.raises(WorkerError, match=r"the number of resets exceeded its limit of 1 .*exit code 3") as caught:
        driver.check()
    assert caught.value.exit_code == 3


def test_too_few_workers_within_the_timeout(job, agents):
    driver = Driver(elastic(2, least=2, timeout=60.0), job, agents, 30.0, lambda: agents.now)
    driver.found({"a": 1})
    agents.wait(61.0)
    assert driver.is_over
    assert agents.started == {}
    with pytest.raises(ExecutorError, match=r"0 of at least 2 workers .*a: 1 slot.* elastic timeout of 60 s"):
        driver.check()


def test_no_host_at_all_within_the_timeout(job, agents):
    driver = Driver(elastic(1, timeout=60.0), job, agents, 30.0, lambda: agents.now)
    driver.found({})
    agents.wait(61.0)
    with pytest.raises(ExecutorError, match=r"0 of at least 1 workers .*none was found.* elastic timeout of 60 s"):
        driver.check()


def test_a_newcomer_that_does_not_come_up_is_a_failure_of_its_host(job, agents):
    driver = begun(elastic(1, most=2, cooldown=Cooldown(10.0, 10.0)), job, agents, a=1)
    driver.found({"a": 1, "b": 1})
    agents.wait(30.0)
    assert agents.killed == ["worker-1"]
    assert not driver.is_over
    agents.wait(10.5)
    assert "worker-2" in agents.started


def test_the_timeout_of_the_job_is_that_of_its_workers(job, agents):
    begun(elastic(2, timeout=90.0), job, agents)
    assert agents.started["worker-0"]["HOROVOD_ELASTIC_TIMEOUT"] == "90.0"


# Workers that end when others are done.


@pytest.mark.parametrize("failure", [KILLED, EXITED])
def test_the_failure_of_the_last_worker_is_told_as_in_a_static_job(job, agents, failure):
    driver = begun(elastic(2), job, agents)
    driver.done("worker-1")
    driver.failed("worker-0", failure)
    with pytest.raises(WorkerError, match=f"^rank 0 on a {failure.text}$") as caught:
        driver.check()
    error = caught.value
    assert (error.rank, error.host, error.exit_code) == (0, "a", failure.exit_code)
    assert error.last_lines == failure.last_lines
    assert published(job, 2).text == f"rank 0 on a {failure.text}"


def test_the_likeliest_of_several_is_the_cause(job, agents):
    """Two ranks were in an operation after the function."""
    driver = begun(elastic(3), job, agents)
    driver.done("worker-0")
    driver.failed("worker-1", LOST)
    driver.failed("worker-2", KILLED)
    with pytest.raises(WorkerError, match="rank 2 on a was killed by signal 9"):
        driver.check()


def test_the_rank_is_the_one_that_the_worker_has_had_itself(job, agents):
    """It never enters the world that is published when rank 0 is done."""
    driver = begun(elastic(3), job, agents)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.done("worker-0")
    driver.done("worker-1")
    driver.failed("worker-2", EXITED)
    with pytest.raises(WorkerError, match="rank 2 on a ended with exit code 3"):
        driver.check()


def test_an_error_of_the_function_stays_as_it_is(job, agents):
    driver = begun(elastic(2), job, agents)
    driver.done("worker-1")
    driver.failed("worker-0", replace(RAISED, kind=FailureKind.EXIT))
    with pytest.raises(KeyError):
        driver.check()


def test_a_lost_host_is_told_by_its_rank(job, agents):
    driver = begun(elastic(2), job, agents, a=1, b=1)
    driver.done("worker-0")
    driver.host_lost("b", "its agent has ended")
    with pytest.raises(WorkerError, match=r"^rank 1 on b was lost \(its agent has ended\)$") as caught:
        driver.check()
    assert caught.value.exit_code is None


def test_one_whose_function_returned_before_its_host_was_lost_is_done(job, agents):
    driver = begun(elastic(3), job, agents, a=1, b=2)
    driver.done("worker-0")
    driver.host_lost("b", "its agent has ended", {"worker-0", "worker-1", "worker-2"}.__contains__)
    driver.check()
    assert driver.order == ("worker-0", "worker-1", "worker-2")


def test_an_older_failure_is_not_the_status_of_a_lost_host(job, agents):
    driver = begun(elastic(3), job, agents, a=1, b=2)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.failed("worker-0", KILLED)
    driver.host_lost("b", "its agent has ended")
    with pytest.raises(WorkerError, match=r"every worker with the state .* host b: its agent has ended") as caught:
        driver.check()
    assert caught.value.exit_code is None


def test_a_failure_that_the_others_repaired_is_none_of_the_job(job, agents):
    driver = begun(elastic(3), job, agents)
    driver.done("worker-1")
    driver.failed("worker-2", KILLED)
    report(job, agents, "worker-0", 0, kind="formed", round=2)
    driver.done("worker-0")
    driver.check()
