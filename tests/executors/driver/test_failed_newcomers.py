"""Newcomers that fail are a failure of their host; the ranks that train go on."""

import pytest
from driven import KILLED, begun, elastic, published, report

from executors.api import WorkerError
from executors.failures import Failure, FailureKind

BAD = Failure(FailureKind.EXCEPTION, "ended with exit code 1", 1, ("ImportError: no module",), ImportError("no module"))


def grown(job, agents, **formed):
    driver = begun(elastic(1, most=2), job, agents, a=1)
    formed = {"call": 1, "version": "1.0", "layout": "abc", **formed}
    report(job, agents, "worker-0", 0, kind="formed", round=0, **formed)
    driver.found({"a": 1, "b": 1})
    return driver


def test_an_exception_before_it_was_a_rank(job, agents, caplog):
    driver = grown(job, agents)
    driver.failed("worker-1", BAD)
    assert not driver.is_over
    assert agents.killed == ["worker-1"]
    assert caplog.messages == [
        "worker-1 on host b failed before it could train; the others go on: it ended with exit code 1. "
        "The last lines of its standard error:\n    ImportError: no module"
    ]
    driver.done("worker-0")
    driver.check()


def test_a_later_failure_of_the_job_is_its_own(job, agents):
    driver = grown(job, agents)
    driver.failed("worker-1", BAD)
    driver.failed("worker-0", KILLED)
    agents.wait(1.0)
    with pytest.raises(WorkerError, match="every worker with the state of the training is lost") as caught:
        driver.check()
    assert caught.value.rank == 0


def test_an_exception_in_a_world_that_has_not_formed(job, agents):
    driver = grown(job, agents)
    report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
    assert len(published(job, 1).workers) == 2
    driver.failed("worker-1", BAD)
    assert published(job, 2).workers == (("worker-0", "a"),)
    assert not driver.is_over


@pytest.mark.parametrize(
    ("explain", "text"),
    [
        (
            lambda driver, agents: driver.failed("worker-1", KILLED),
            "was killed by signal 9. The last lines of its standard error:\n    last line",
        ),
        (lambda driver, agents: agents.wait(1.0), "ended"),
    ],
)
def test_one_whose_end_the_others_notice_first_is_told_of_with_the_reason(job, agents, caplog, explain, text):
    driver = grown(job, agents)
    report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
    report(job, agents, "worker-0", 1, kind="lost", round=1, ranks=(1,), text="gone")
    assert published(job, 2).workers == (("worker-0", "a"),)
    report(job, agents, "worker-0", 2, kind="formed", round=2, call=1)
    assert not caplog.messages
    explain(driver, agents)
    assert caplog.messages == [f"worker-1 on host b failed before it could train; the others go on: it {text}"]


def test_one_that_has_ended_with_success_after_all_has_not_failed(job, agents, caplog):
    driver = grown(job, agents)
    report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
    report(job, agents, "worker-0", 1, kind="lost", round=1, ranks=(1,), text="gone")
    report(job, agents, "worker-0", 2, kind="formed", round=2, call=1)
    driver.done("worker-1")
    assert not caplog.messages


def test_before_anybody_has_trained_an_exception_ends_the_job(job, agents):
    driver = begun(elastic(2), job, agents)
    driver.failed("worker-1", BAD)
    assert driver.is_over


def test_an_exception_of_a_newcomer_that_has_trained_ends_the_job(job, agents):
    driver = grown(job, agents)
    report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
    report(job, agents, "worker-0", 1, kind="formed", round=1, call=1)
    driver.failed("worker-1", BAD)
    assert driver.is_over


@pytest.mark.parametrize(
    ("ready", "text"),
    [
        (
            {"version": "2.0"},
            "it has version 2.0 of hvd-cluster, but the ranks have 1.0; install one version on all",
        ),
        ({}, "it has version unknown of hvd-cluster, but the ranks have 1.0"),
        ({"version": "1.0", "call": 1, "layout": "xyz"}, "it has a state with other entries, shapes or types than"),
    ],
)
def test_one_that_cannot_share_the_state(job, agents, caplog, ready, text):
    driver = grown(job, agents)
    report(job, agents, "worker-1", 0, kind="ready", **ready)
    assert agents.killed == ["worker-1"]
    driver.failed("worker-1", KILLED)
    assert [text in message for message in caplog.messages] == [True]
    assert not driver.is_over
    with pytest.raises(Exception, match="worlds/1"):
        published(job, 1)


@pytest.mark.parametrize(
    ("formed", "ready"),
    [({"call": 2}, {"layout": "xyz"}), ({"layout": ""}, {"layout": "xyz"}), ({}, {"layout": ""}), ({}, {})],
)
def test_states_that_cannot_be_compared_are_compared_later(job, agents, formed, ready):
    grown(job, agents, **formed)
    report(job, agents, "worker-1", 0, kind="ready", **{"call": 1, "version": "1.0", "layout": "abc", **ready})
    assert len(published(job, 1).workers) == 2
