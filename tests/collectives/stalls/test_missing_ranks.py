"""Reports of an engine about tensors that wait for missing ranks, and the end after the shutdown time."""

import pytest

from collectives.api import CollectiveTimeoutError, MismatchError
from tests.collectives.engine.job import Caller, ones, outcome, run, running, submit, until

pytestmark = pytest.mark.usefixtures("transport")


@pytest.mark.parametrize("asleep", [False, True])
def test_what_waits_is_reported_again_and_again_and_still_runs(caplog, asleep):
    with running(3, stall_warning=0.05) as job:
        if asleep:
            submit(job.engines[2], ones(job.engines[2]), "x")
        callers = [] if asleep else [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: len(caplog.records) >= 2)
        for record in caplog.records:
            assert "missing rank" in record.getMessage()
            assert "'x'" in record.getMessage()
            assert (record.tensors, record.batch) == (("x",), None)
        if asleep:
            callers = [Caller(job.engines[0], "x")]
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * len(callers)


def test_after_the_shutdown_time_all_ranks_end_with_the_report(monkeypatch):
    """One report covers all tensors, however far apart the ranks come."""
    monkeypatch.setattr("collectives.stalls.inspector.SOON", 1.0)

    def body(engine):
        if engine.topology.rank:
            return outcome(lambda: run(engine, ones(engine), "x"))
        return outcome(lambda: run(engine, ones(engine), "y"))

    with running(3, stall_warning=0.05, stall_shutdown=1.0) as job:
        errors = job.run(body)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, CollectiveTimeoutError)
        assert "missing rank 0: 'x'" in str(error)
        assert "rank 0 waits itself, for 'y'" in str(error)
        assert "missing ranks 1, 2: 'y'" in str(error)
        assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS (1)" in str(error)


def test_the_report_of_rank_0_says_where_the_missing_ranks_stand(caplog):
    with running(4, stall_warning=0.05, sets=[(2, 3)]) as job:
        callers = [Caller(job.engines[rank], "x") for rank in (0, 1)]
        other = Caller(job.engines[2], body=lambda engine: run(engine, ones(engine), "y", process_set=1))
        until(lambda: said(caplog, "rank 2 waits itself, for 'y' on process set 1"))
        assert said(caplog, "rank 3 ") == said(caplog, "It has submitted nothing yet")
        job.shutdown()
        for caller in (*callers, other):
            caller.result()


def test_rank_0_says_where_it_stands_itself_and_what_it_submitted_last(caplog):
    with running(2, stall_warning=0.05) as job:
        job.run(lambda engine: run(engine, ones(engine), "first"))
        caller = Caller(job.engines[1], "x")
        until(lambda: said(caplog, "rank 0 "))
        assert "Its last collective is 'first', submitted" in said(caplog, "rank 0 ")[0]
        assert run(job.engines[0], ones(job.engines[0]), "x")[0] == caller.result()[0] == 3.0


def test_every_joined_rank_reports_a_silent_rank(caplog):
    text = "missing rank 1: 'join.noname.0'"
    with running(3, stall_warning=0.05) as job:
        callers = [Caller(job.engines[rank], body=lambda engine: engine.join()) for rank in (0, 2)]
        until(lambda: said(caplog, text, "rank 2") and len(said(caplog, text)) > len(said(caplog, text, "rank 2")))
        assert all("'join.noname.0'" in record.getMessage() for record in caplog.records)
        assert [job.engines[1].join(), *(caller.result() for caller in callers)] == [1] * 3


def test_after_the_shutdown_time_a_silent_rank_ends_a_join():
    with running(3, stall_warning=0.05, stall_shutdown=1.0) as job:
        callers = [Caller(job.engines[rank], body=lambda engine: engine.join()) for rank in (0, 2)]
        for caller in callers:
            error = caller.result()
            assert isinstance(error, CollectiveTimeoutError)
            assert error.ranks == (1,)
            assert "missing rank 1: 'join.noname.0'" in str(error)


@pytest.fixture
def impatient(monkeypatch):
    """Rank 0 must answer at once."""
    monkeypatch.setattr("collectives.stalls.watchdog.GRACE_SECONDS", 0.02)


@pytest.fixture
def hold():
    """Make a rank of a job unable to act, as if its process were stopped, until the job ends."""
    held = []

    def hold(engine):
        lock = engine._progress._driving.lock
        until(lambda: lock.acquire(blocking=False))
        held.append(lock)

    return hold, lambda: [held.pop().release() for _ in list(held)]


def said(caplog, text, by=""):
    """The warnings that contain ``text`` and begin with ``by``."""
    found = [record.getMessage() for record in caplog.records]
    return [each for each in found if text in each and each.startswith(by)]


def warnings_of(caplog, rank):
    """The log of ``rank``, which is not 0."""
    return said(caplog, "", f"rank {rank}")


@pytest.mark.usefixtures("impatient")
def test_every_rank_reports_that_rank_0_does_not_answer(caplog, hold):
    stop, resume = hold
    with running(3, stall_warning=0.05) as job:
        stop(job.engines[0])
        callers = [Caller(job.engines[rank], "x") for rank in (1, 2)]
        for rank in (1, 2):
            until(lambda rank=rank: len(warnings_of(caplog, rank)) >= 2)
            for text in warnings_of(caplog, rank):
                assert "waits for 'x', and for the decision of rank 0" in text
                assert "rank 0 on host 'host-0': no answer for" in text
        resume()
        assert run(job.engines[0], ones(job.engines[0]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * 2


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_waits_behind_a_call_it_refused_reports_that_rank_0_does_not_answer(caplog, hold):
    stop, resume = hold
    with running(2, stall_warning=0.05) as job:
        stop(job.engines[0])
        second = job.engines[1]
        outcome(lambda: run(second, ones(second), "x", prescale_factor=float("nan")))
        caller = Caller(second, "x")
        until(lambda: warnings_of(caplog, 1))
        assert "waits for 'x', and for the decision of rank 0; rank 0 on host 'host-0'" in warnings_of(caplog, 1)[0]
        resume()
        first = job.engines[0]
        assert isinstance(outcome(lambda: run(first, ones(first), "x")), MismatchError)
        assert run(first, ones(first), "x")[0] == caller.result()[0] == 3.0


def test_the_report_waits_for_an_answer_only_for_a_while(caplog, hold, monkeypatch):
    monkeypatch.setattr("collectives.stalls.inspector.ANSWER_SECONDS", 0.05)
    monkeypatch.setattr("collectives.stalls.status.LOOK_SECONDS", 0.0)
    stop, resume = hold
    with running(2, stall_warning=0.05) as job:
        stop(job.engines[1])
        caller = Caller(job.engines[0], "x")
        until(lambda: said(caplog, "rank 1 does not answer", "a tensor has waited"))
        resume()
        until(lambda: said(caplog, "It has submitted nothing yet", "a tensor has waited"))
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == caller.result()[0] == 3.0


def test_every_rank_reports_the_ranks_that_do_not_come(caplog, hold):
    stop, resume = hold
    with running(3, stall_warning=0.05) as job:
        stop(job.engines[1])
        callers = [Caller(job.engines[rank], "x") for rank in (0, 2)]
        until(lambda: said(caplog, "missing rank 1: 'x'", "rank 2"))
        assert not said(caplog, "rank 0 on host 'host-0': no answer")
        resume()
        assert run(job.engines[1], ones(job.engines[1]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in callers] == [6.0] * 2


@pytest.mark.usefixtures("impatient")
def test_the_shutdown_time_ends_every_rank_that_waits_for_a_silent_rank_0(hold):
    stop, resume = hold
    with running(3, stall_warning=0.05, stall_shutdown=0.1) as job:
        stop(job.engines[0])
        callers = [Caller(job.engines[rank], "x") for rank in (1, 2)]
        for caller in callers:
            error = caller.result()
            assert isinstance(error, CollectiveTimeoutError)
            assert error.ranks == (0,)
            assert "rank 0 on host 'host-0'" in str(error)
            assert "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS" in str(error)
        resume()
