"""Exceptions that workers report, because their standard error may show nothing of them."""

import pytest
from driven import EXITED, KILLED, RAISED, begun, elastic, published, report

from executors.api import WorkerError
from executors.failures import Failure, FailureKind


def raise_in(job, agents, worker, number=0, text="KeyError: 'user bug'"):
    report(job, agents, worker, number, kind="raised", text=text)


def test_the_end_of_the_worker_ends_the_job_with_the_exception(job, agents):
    driver = begun(elastic(3), job, agents)
    raise_in(job, agents, "worker-1")
    assert not driver.is_over
    driver.failed("worker-1", Failure(FailureKind.EXIT, "ended with exit code 1", 1, ("CRASH",)))
    assert agents.ended == ["worker-1"]
    text = "rank 1 on a raised KeyError: 'user bug', and ended with exit code 1"
    with pytest.raises(WorkerError, match=text) as caught:
        driver.check()
    assert (caught.value.exit_code, caught.value.last_lines) == (1, ("CRASH",))


def test_others_that_notice_the_end_first_do_not_hide_it(job, agents):
    driver = begun(elastic(3), job, agents)
    raise_in(job, agents, "worker-1")
    report(job, agents, "worker-0", 0, kind="lost", round=0, ranks=(1,), text="gone")
    driver.failed("worker-1", Failure(FailureKind.EXIT, "ended with exit code 1", 1, ("CRASH",)))
    with pytest.raises(WorkerError, match="raised KeyError") as caught:
        driver.check()
    assert caught.value.last_lines == ("CRASH",)


def test_one_that_is_caught_is_no_failure(job, agents):
    driver = begun(elastic(2), job, agents)
    raise_in(job, agents, "worker-1")
    driver.done("worker-1")
    driver.done("worker-0")
    driver.check()


def test_one_that_was_caught_is_not_the_reason_of_a_later_end(job, agents):
    driver = begun(elastic(2), job, agents)
    raise_in(job, agents, "worker-1")
    raise_in(job, agents, "worker-1", 1, text="")
    driver.failed("worker-1", KILLED)
    assert not driver.is_over
    assert published(job, 1).text == "rank 1 on host a lost (was killed by signal 9)"


@pytest.mark.parametrize("failure", [KILLED, EXITED])
def test_one_that_does_not_explain_the_end_is_told_and_no_more(job, agents, failure):
    driver = begun(elastic(2), job, agents)
    raise_in(job, agents, "worker-1")
    driver.failed("worker-1", failure)
    assert not driver.is_over
    text = f"rank 1 on host a lost ({failure.text}; before, it raised KeyError: 'user bug')"
    assert published(job, 1).text == text


def test_one_that_ends_so_slowly_that_the_others_accuse_its_rank_is_the_reason(job, agents):
    driver = begun(elastic(2), job, agents)
    raise_in(job, agents, "worker-1")
    report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(1,), text="rank 1 did not answer")
    agents.wait(1.0)
    with pytest.raises(WorkerError, match="raised KeyError: 'user bug', and no longer answered"):
        driver.check()


def test_one_that_nobody_catches_ends_the_job_though_the_process_does_not_end(job, agents):
    driver = begun(elastic(2), job, agents)
    report(job, agents, "worker-1", 0, kind="raised", text="KeyError: 'user bug'", is_uncaught=True)
    agents.wait(4.9)
    assert not driver.is_over
    agents.wait(0.1)
    assert agents.ended == ["worker-1"]
    with pytest.raises(WorkerError, match="rank 1 on a raised KeyError: 'user bug', and did not end within 5 s"):
        driver.check()


@pytest.mark.parametrize(
    "end", [lambda driver: driver.done("worker-1"), lambda driver: driver.failed("worker-1", EXITED)]
)
def test_the_end_of_its_process_counts_where_it_comes_in_time(job, agents, end):
    driver = begun(elastic(2), job, agents)
    report(job, agents, "worker-1", 0, kind="raised", text="KeyError: 'user bug'", is_uncaught=True)
    end(driver)
    agents.wait(10.0)
    assert not driver.is_over


def test_a_newcomer_that_does_not_end_is_killed(job, agents):
    driver = begun(elastic(1, most=2), job, agents, a=1)
    report(job, agents, "worker-0", 0, kind="formed", round=0)
    driver.found({"a": 1, "b": 1})
    report(job, agents, "worker-1", 0, kind="raised", text="KeyError: 'user bug'", is_uncaught=True)
    agents.wait(5.0)
    assert agents.killed == ["worker-1"]
    assert not driver.is_over


def test_the_error_of_a_function_stays_as_it_is(job, agents):
    driver = begun(elastic(2), job, agents)
    raise_in(job, agents, "worker-1")
    driver.failed("worker-1", RAISED)
    with pytest.raises(KeyError):
        driver.check()
