"""The driver of a job whose ranks stay the same."""

import pytest
from driven import EXITED, KILLED, LOST, RAISED, begun, elastic

from collectives.api import PeerLostError
from collectives.handshake import entries
from collectives.store.memory import PrefixStore
from executors.api import StartTimeoutError, WorkerError
from executors.driver.driver import Driver
from executors.failures import Failure, FailureKind, Patience
from executors.job import worlds
from executors.membership import Limits

LEFT = Failure(
    FailureKind.SHUT_DOWN,
    "ended with exit code 1",
    1,
    ("collectives.api.ShutDownError: Horovod has been shut down by rank 1: it raised ValueError: bad",),
)


def test_each_worker_gets_its_place(job, agents):
    begun(Limits.static(3), job, agents, a=2, b=1)
    places = [(env["host"], env["HOROVOD_RANK"], env["HOROVOD_LOCAL_RANK"]) for env in agents.started.values()]
    assert places == [("a", "0", "0"), ("a", "1", "1"), ("b", "2", "0")]
    assert all(env["HOROVOD_SIZE"] == "3" for env in agents.started.values())
    assert {env["HOROVOD_ELASTIC"] for env in agents.started.values()} == {"0"}


def test_all_done_ends_the_job(job, agents):
    driver = begun(Limits.static(2), job, agents)
    driver.done("worker-1")
    assert not driver.is_over
    driver.done("worker-0")
    assert driver.is_over
    assert driver.order == ("worker-0", "worker-1")
    driver.check()
    assert agents.ended == []


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (lambda driver: driver.done("worker-1"), "ended with exit code 0"),
        (lambda driver: driver.failed("worker-1", KILLED), "was killed by signal 9"),
    ],
)
def test_ranks_that_wait_for_one_that_has_ended_hear_of_it(job, agents, end, text, monkeypatch):
    monkeypatch.setattr(entries, "LOOK_SECONDS", 0.0)
    driver = begun(Limits.static(2), job, agents, a=1, b=1)
    watch = entries.EndWatch(PrefixStore(job.store, agents.started["worker-0"]["HOROVOD_JOB_ID"]))
    watch.check()
    end(driver)
    with pytest.raises(
        PeerLostError,
        match=rf"^rank 1 on host b {text} and did not come to this hvd\.init\(\); look at its output$",
    ):
        watch.check()
    driver.close()
    watch.check()


def test_newcomers_on_their_way_do_not_keep_a_job_that_is_done(job, agents):
    driver = begun(elastic(1, most=2), job, agents, a=1)
    driver.found({"a": 2})
    driver.done("worker-0")
    agents.wait(1.0)
    assert driver.is_over
    assert agents.ended == [None]


def test_an_exception_ends_the_others_at_once(job, agents):
    driver = begun(Limits.static(2), job, agents)
    driver.failed("worker-1", RAISED)
    assert agents.ended == ["worker-1"]
    with pytest.raises(KeyError):
        driver.check()


def test_a_likelier_cause_may_come_later(job, agents):
    driver = begun(Limits.static(3), job, agents)
    driver.failed("worker-0", LOST)
    driver.failed("worker-1", KILLED)
    assert agents.ended == []
    agents.wait(1.0)
    assert agents.ended == ["worker-1"]
    driver.failed("worker-2", Failure(FailureKind.EXCEPTION, "raised because it was ended"))
    with pytest.raises(WorkerError, match="rank 1 on a was killed by signal 9") as caught:
        driver.check()
    error = caught.value
    assert (error.rank, error.host, error.exit_code, error.last_lines) == (1, "a", -9, ("last line",))


def test_an_exception_after_a_consequence_ends_the_wait(job, agents):
    driver = begun(Limits.static(2), job, agents)
    driver.failed("worker-0", LOST)
    driver.failed("worker-1", Failure(FailureKind.EXCEPTION, "ended with exit code 1", 1))
    assert agents.ended == ["worker-1"]
    agents.wait(5.0)
    assert agents.ended == ["worker-1"]


def test_a_rank_that_raised_is_the_cause_before_its_process_ends(job, agents):
    driver = begun(Limits.static(3), job, agents)
    driver.failed("worker-0", LEFT)
    agents.wait(1.0)
    assert agents.ended == ["worker-1"]
    with pytest.raises(WorkerError, match="rank 1 on a raised ValueError: bad, and its process has not ended yet"):
        driver.check()
    driver.failed("worker-2", Failure(FailureKind.EXCEPTION, "raised because it was ended"))
    driver.failed("worker-1", KILLED)
    with pytest.raises(WorkerError, match="rank 1 on a raised ValueError: bad"):
        driver.check()
    driver.failed("worker-1", Failure(FailureKind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
    with pytest.raises(WorkerError, match="rank 1 on a ended with exit code 1") as caught:
        driver.check()
    assert (caught.value.exit_code, caught.value.last_lines) == (1, ("ValueError: bad",))


def test_a_rank_that_caught_its_exception_and_was_done_is_not_the_cause(job, agents):
    driver = begun(Limits.static(3), job, agents)
    driver.done("worker-1")
    driver.failed("worker-0", LEFT)
    agents.wait(1.0)
    assert agents.ended == ["worker-0"]


def test_patience_lets_the_others_finish_after_an_exception(job, agents):
    driver = begun(Limits.static(3), job, agents, Patience(5.0, 5.0))
    driver.failed("worker-1", RAISED)
    agents.wait(4.9)
    driver.failed("worker-2", Failure(FailureKind.EXCEPTION, "raised", error=ValueError("later")))
    assert agents.ended == []
    agents.wait(0.1)
    assert agents.ended == ["worker-1"]
    with pytest.raises(KeyError):
        driver.check()


def test_a_death_ends_the_wait_and_is_the_cause(job, agents):
    driver = begun(Limits.static(2), job, agents, Patience(5.0, 5.0))
    driver.failed("worker-0", RAISED)
    driver.failed("worker-1", Failure(FailureKind.DEATH, "died"))
    assert agents.ended == ["worker-1"]
    with pytest.raises(WorkerError, match="rank 1 on a died"):
        driver.check()


def test_ranks_stay_when_others_are_done(job, agents):
    driver = begun(Limits.static(3), job, agents)
    driver.done("worker-0")
    driver.failed("worker-2", EXITED)
    with pytest.raises(WorkerError, match="rank 2 on a ended with exit code 3") as caught:
        driver.check()
    assert caught.value.rank == 2


def test_many_workers_are_ranked_once(job, agents, monkeypatch):
    ranked = []
    assign_ranks = worlds.assign_ranks
    monkeypatch.setattr(worlds, "assign_ranks", lambda hosts: ranked.append(hosts) or assign_ranks(hosts))
    driver = begun(Limits.static(64), job, agents, a=32, b=32)
    for worker in agents.started:
        driver.done(worker)
    assert driver.is_over
    assert len(ranked) < 8


def test_workers_that_do_not_come_up_are_named(job, agents):
    driver = Driver(Limits.static(3), job, agents, 30.0, lambda: agents.now)
    driver.found({"a": 3})
    driver.up("worker-1")
    agents.wait(30.0)
    assert agents.ended == [None]
    with pytest.raises(StartTimeoutError, match=r"of 3 ranks on a, these did not .* within 30 s: 0, 2;"):
        driver.check()
