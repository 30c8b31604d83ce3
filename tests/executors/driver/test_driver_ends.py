"""How an elastic job ends."""

import pytest
from driven import EXITED, KILLED, begun, elastic, published

from executors.api import ExecutorError, WorkerError
from executors.driver import Driver
from executors.failure import Failure, Kind
from executors.membership import Cooldown


def test_an_exception_of_the_user_ends_an_elastic_job_at_once(job, agents):
    driver = begun(elastic(3), job, agents)
    driver.failed("worker-1", Failure(Kind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
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
