"""The reports of ranks about their waits on their way to rank 0, and the log there."""

import logging

import pytest

from collectives.controller.messages import Pong, WaitReport, Waits
from collectives.engine import counters
from collectives.events import EventStream, Straggling
from collectives.stalls import stragglers
from collectives.stalls.straggler_reports import StragglerReporter, describe
from collectives.stalls.stragglers import Cause, Straggler, StragglerInspector
from tests.collectives.engine.bypass_job import all_bypass, bypass_of, warm_up
from tests.collectives.engine.job import Caller, ones, run, running, until

HELD_UP = WaitReport(0.25, (Waits(0, 0.2, 0.0, 4),))
SLOW = WaitReport(0.25, (Waits(0, 0.0, 0.2, 4),))
SECOND = 1.0


class Rank0:
    """The reporter of two ranks, at a time that the test says."""

    def __init__(self, monkeypatch):
        self.now, self.events = 0.0, EventStream()
        monkeypatch.setattr("collectives.stalls.straggler_reports.time.monotonic", lambda: self.now)
        inspector = StragglerInspector(2, lambda process_set: (0, 1))
        self.reporter = StragglerReporter(inspector, self.events, ("one", "two"))

    def hear(self, report, seconds, of_rank_1=None):
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            if of_rank_1 is not None:
                self.reporter.hear(1, of_rank_1)
            self.reporter.hear(0, report)


@pytest.fixture
def rank_0(monkeypatch):
    return Rank0(monkeypatch)


def test_a_straggler_is_one_line_and_an_event(rank_0, caplog):
    published = []
    rank_0.events.subscribe(published.append)
    rank_0.hear(HELD_UP, 2 * SECOND)
    [line] = caplog.messages
    assert line == (
        "rank 1 on host 'two' is a straggler: the other ranks wait for it, 50 ms each time, 80% of their time. "
        "It submits its tensors late: look at its data and its computation"
    )
    [event] = published
    assert isinstance(event, Straggling)
    assert (event.straggler, event.is_over) == (rank_0.reporter.stragglers[0], False)
    rank_0.hear(WaitReport(0.25), 2 * SECOND)
    assert [event.is_over for event in published] == [False, True]
    assert rank_0.reporter.stragglers == ()


def test_a_slow_part_of_operations_is_another_cause(rank_0, caplog):
    rank_0.hear(SLOW, 2 * SECOND)
    assert "slow inside of operations" in caplog.text
    assert [each.cause for each in rank_0.reporter.stragglers] == [Cause.BACKEND]


@pytest.mark.parametrize("report", [HELD_UP, SLOW], ids=["late", "slow inside"])
def test_a_straggler_without_a_core_is_told_from_one_that_computes_for_long(rank_0, caplog, report):
    rank_0.hear(report, 2 * SECOND, WaitReport(0.25, (), 0.125))
    [line] = caplog.messages
    assert line == (
        "rank 1 on host 'two' is a straggler: the other ranks wait for it, 50 ms each time, 80% of their time. "
        "It waited for a processor for 50% of its own time: host 'two' has other work, more ranks than cores, or a "
        "small CPU quota. Give the job cores of its own, or start fewer ranks there"
    )


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (
            Cause.LATE,
            "It submits its tensors late. It waited for a processor for 45% of its own time, the others hardly less: "
            "host 'two' has other work, more ranks than cores, or a small CPU quota. Give the job cores of its own, or "
            "start fewer ranks there; if it stays late, look at its data and its computation",
        ),
        (Cause.BACKEND, "It is slow inside of operations. It waited for a processor for 45% of its own time"),
    ],
)
def test_where_all_ranks_lack_cores_the_machine_comes_before_the_rank(cause, text):
    assert text in describe(Straggler(1, 0, cause, 0.225, 0.12, 0.45, 0.05), "two")
    assert "look at its" not in describe(Straggler(1, 0, Cause.LATE, 0.225, 0.12, 0.45, 0.06), "two")
    assert "processor" not in describe(Straggler(1, 0, cause, 0.225, 0.12, 0.11, 0.05), "two")


def test_short_waits_for_a_core_are_no_excuse(rank_0, caplog):
    rank_0.hear(HELD_UP, 2 * SECOND, WaitReport(0.25, (), 0.05))
    assert "look at its data and its computation" in caplog.text


def test_a_rank_is_in_the_log_once_a_minute(rank_0, caplog):
    for _ in range(8):  # 32 s
        rank_0.hear(HELD_UP, 2 * SECOND)
        rank_0.hear(WaitReport(0.25), 2 * SECOND)
    assert len(caplog.messages) == 1
    rank_0.now += 60.0
    rank_0.hear(HELD_UP, 2 * SECOND)
    assert len(caplog.messages) == 2


def test_a_silent_rank_is_a_straggler_without_a_second_line(rank_0, caplog):
    rank_0.reporter.silent((1,), 1.5)
    assert [each.cause for each in rank_0.reporter.stragglers] == [Cause.STOPPED]
    assert not caplog.messages
    rank_0.reporter.answered(0)
    rank_0.reporter.hear(0, HELD_UP)
    assert [each.cause for each in rank_0.reporter.stragglers] == [Cause.STOPPED]
    rank_0.reporter.answered(1)
    assert rank_0.reporter.stragglers == ()


def test_an_answer_to_the_roll_call_shows_that_a_rank_goes_on():
    with running(2) as job:
        link = job.engines[0]._loop._link
        link._stragglers.silent((1,), 1.5)
        assert [each.rank for each in job.engines[0].stragglers] == [1]
        link._hear_aside(1, Pong())
        assert job.engines[0].stragglers == ()


@pytest.fixture
def often(monkeypatch):
    """A window ends with each batch, and each wait is noteworthy."""
    monkeypatch.setattr(stragglers, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(stragglers, "NOTEWORTHY_SHARE", -1.0)
    monkeypatch.setattr(counters, "LONG_SECONDS", 0.0)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("kind", [{}, {"shared_memory": True}, {"over_tcp": True}], ids=["inproc", "shm", "tcp"])
def test_reports_do_not_end_the_bypass(kind, monkeypatch):
    monkeypatch.setattr("collectives.engine.bypass.LATE_SECONDS", 1000.0)
    heard = []
    monkeypatch.setattr(StragglerReporter, "hear", lambda self, rank, report: heard.append((rank, report)))
    with running(3, **kind) as job:
        job.run(warm_up)
        assert all_bypass(job)
        early = Caller(job.engines[0], "x")
        others = [Caller(job.engines[1], "x")]
        until(lambda: job.engines[0]._works and job.engines[1]._works)
        job.engines[1]._loop._link.report_waits(HELD_UP)  # while rank 0 waits in a round
        until(lambda: (1, HELD_UP) in heard)
        assert bypass_of(job.engines[2]).on
        assert run(job.engines[2], ones(job.engines[2]), "x")[0] == 6.0
        assert [caller.result()[0] for caller in (early, *others)] == [6.0] * 2
        assert all_bypass(job)
    assert {rank for rank, _ in heard} == {0, 1, 2}


def test_healthy_ranks_send_nothing(monkeypatch, caplog):
    heard = []
    monkeypatch.setattr(StragglerReporter, "hear", lambda self, rank, report: heard.append(report))
    monkeypatch.setattr(stragglers, "NOTEWORTHY_SHARE", 2.0)
    monkeypatch.setattr(stragglers, "WINDOW_SECONDS", 0.0)
    with running(2) as job, caplog.at_level(logging.WARNING):
        job.run(warm_up)
    assert not heard
