"""The driver of a job over agents that only note what they are asked for; the clock of the loop is the test's."""

import json
import re

import pytest

from collectives.api import PeerLostError
from collectives.control.handshake import notes
from collectives.rendezvous.store import PrefixStore
from executors import worlds
from executors.api import ExecutorError, StartTimeoutError, WorkerError
from executors.course import Course
from executors.driver import Driver
from executors.failure import Failure, Kind, Patience
from executors.job import Job
from executors.membership import Cooldown, Limits
from executors.worlds import CALL, Published, Report, report_key, world_key

KILLED = Failure(Kind.SIGNAL, "was killed by signal 9", -9, ("last line",))
EXITED = Failure(Kind.EXIT, "ended with exit code 3", 3)
LOST = Failure(Kind.LOST_PEER, "ended with exit code 1", 1)
RAISED = Failure(Kind.EXCEPTION, "raised", error=KeyError("x"))
LEFT = Failure(
    Kind.SHUT_DOWN,
    "ended with exit code 1",
    1,
    ("collectives.api.ShutDownError: Horovod has been shut down by rank 1: it raised ValueError: bad",),
)
PROCESSES = Patience()


class Agents:
    """Notes the calls; ``wait`` lets the time pass, and ``call`` runs what other threads have handed over."""

    def __init__(self):
        self.now = 100.0
        self.started, self.stopped, self.killed, self.ended = {}, [], [], []
        self._alarms, self._calls = [], []

    def start(self, worker, host, environment):
        self.started[worker] = {"host": host, **environment}

    def stop(self, worker):
        self.stopped.append(worker)

    def kill(self, worker):
        self.killed.append(worker)

    def end(self, spare=None):
        self.ended.append(spare)

    def after(self, seconds, action):
        self._alarms.append((self.now + seconds, action))

    def soon(self, action):
        self._calls.append(action)

    def call(self):
        while self._calls:
            self._calls.pop(0)()

    def wait(self, seconds):
        end = self.now + seconds
        while due := sorted((alarm for alarm in self._alarms if alarm[0] <= end), key=lambda alarm: alarm[0]):
            self._alarms.remove(due[0])
            self.now = max(self.now, due[0][0])
            due[0][1]()
        self.now = end


@pytest.fixture
def agents():
    return Agents()


@pytest.fixture
def job():
    with Job(1) as job:
        yield job


def elastic(size, least=1, most=None, **limits):
    return Limits(size, least, most or size, **limits)


def begun(limits, job, agents, patience=PROCESSES, **hosts):
    driver = Driver(limits, job, agents, 30.0, lambda: agents.now, patience=patience)
    driver.found(hosts or {"a": limits.most})
    for worker in agents.started:
        driver.up(worker)
    return driver


def published(job, round):
    return Published.decode(job.store.get(world_key(round), 0.0))


def report(job, agents, worker, number, **fields):
    job.store.set(report_key(worker, number), Report(**fields).encode())
    agents.call()


class TestStaticJobs:
    def test_each_worker_gets_its_place(self, job, agents):
        begun(Limits.static(3), job, agents, a=2, b=1)
        places = [(env["host"], env["HOROVOD_RANK"], env["HOROVOD_LOCAL_RANK"]) for env in agents.started.values()]
        assert places == [("a", "0", "0"), ("a", "1", "1"), ("b", "2", "0")]
        assert all(env["HOROVOD_SIZE"] == "3" for env in agents.started.values())
        assert {env["HOROVOD_ELASTIC"] for env in agents.started.values()} == {"0"}

    def test_all_done_ends_the_job(self, job, agents):
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
    def test_ranks_that_wait_for_one_that_has_ended_hear_of_it(self, job, agents, end, text, monkeypatch):
        monkeypatch.setattr(notes, "LOOK_SECONDS", 0.0)
        driver = begun(Limits.static(2), job, agents, a=1, b=1)
        watch = notes.EndWatch(PrefixStore(job.store, agents.started["worker-0"]["HOROVOD_JOB_ID"]))
        watch.check()
        end(driver)
        with pytest.raises(
            PeerLostError,
            match=rf"^rank 1 on host b {text} and did not come to this hvd\.init\(\); look at its output$",
        ):
            watch.check()
        driver.close()
        watch.check()

    def test_newcomers_on_their_way_do_not_keep_a_job_that_is_done(self, job, agents):
        driver = begun(elastic(1, most=2), job, agents, a=1)
        driver.found({"a": 2})
        driver.done("worker-0")
        agents.wait(1.0)
        assert driver.is_over
        assert agents.ended == [None]

    def test_an_exception_ends_the_others_at_once(self, job, agents):
        driver = begun(Limits.static(2), job, agents)
        driver.failed("worker-1", RAISED)
        assert agents.ended == ["worker-1"]
        with pytest.raises(KeyError):
            driver.check()

    def test_a_likelier_cause_may_come_later(self, job, agents):
        driver = begun(Limits.static(3), job, agents)
        driver.failed("worker-0", LOST)
        driver.failed("worker-1", KILLED)
        assert agents.ended == []
        agents.wait(1.0)
        assert agents.ended == ["worker-1"]
        driver.failed("worker-2", Failure(Kind.EXCEPTION, "raised because it was ended"))
        with pytest.raises(WorkerError, match="rank 1 on a was killed by signal 9") as caught:
            driver.check()
        error = caught.value
        assert (error.rank, error.host, error.exit_code, error.last_lines) == (1, "a", -9, ("last line",))

    def test_an_exception_after_a_consequence_ends_the_wait(self, job, agents):
        driver = begun(Limits.static(2), job, agents)
        driver.failed("worker-0", LOST)
        driver.failed("worker-1", Failure(Kind.EXCEPTION, "ended with exit code 1", 1))
        assert agents.ended == ["worker-1"]
        agents.wait(5.0)
        assert agents.ended == ["worker-1"]

    def test_a_rank_that_raised_is_the_cause_before_its_process_ends(self, job, agents):
        driver = begun(Limits.static(3), job, agents)
        driver.failed("worker-0", LEFT)
        agents.wait(1.0)
        assert agents.ended == ["worker-1"]
        with pytest.raises(WorkerError, match="rank 1 on a raised ValueError: bad, and its process has not ended yet"):
            driver.check()
        driver.failed("worker-2", Failure(Kind.EXCEPTION, "raised because it was ended"))
        driver.failed("worker-1", KILLED)
        with pytest.raises(WorkerError, match="rank 1 on a raised ValueError: bad"):
            driver.check()
        driver.failed("worker-1", Failure(Kind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
        with pytest.raises(WorkerError, match="rank 1 on a ended with exit code 1") as caught:
            driver.check()
        assert (caught.value.exit_code, caught.value.last_lines) == (1, ("ValueError: bad",))

    def test_a_rank_that_caught_its_exception_and_was_done_is_not_the_cause(self, job, agents):
        driver = begun(Limits.static(3), job, agents)
        driver.done("worker-1")
        driver.failed("worker-0", LEFT)
        agents.wait(1.0)
        assert agents.ended == ["worker-0"]

    def test_patience_lets_the_others_finish_after_an_exception(self, job, agents):
        driver = begun(Limits.static(3), job, agents, Patience(5.0, 5.0))
        driver.failed("worker-1", RAISED)
        agents.wait(4.9)
        driver.failed("worker-2", Failure(Kind.EXCEPTION, "raised", error=ValueError("later")))
        assert agents.ended == []
        agents.wait(0.1)
        assert agents.ended == ["worker-1"]
        with pytest.raises(KeyError):
            driver.check()

    def test_a_death_ends_the_wait_and_is_the_cause(self, job, agents):
        driver = begun(Limits.static(2), job, agents, Patience(5.0, 5.0))
        driver.failed("worker-0", RAISED)
        driver.failed("worker-1", Failure(Kind.DEATH, "died"))
        assert agents.ended == ["worker-1"]
        with pytest.raises(WorkerError, match="rank 1 on a died"):
            driver.check()

    def test_ranks_stay_when_others_are_done(self, job, agents):
        driver = begun(Limits.static(3), job, agents)
        driver.done("worker-0")
        driver.failed("worker-2", EXITED)
        with pytest.raises(WorkerError, match="rank 2 on a ended with exit code 3") as caught:
            driver.check()
        assert caught.value.rank == 2

    def test_many_workers_are_ranked_once(self, job, agents, monkeypatch):
        ranked = []
        assign_ranks = worlds.assign_ranks
        monkeypatch.setattr(worlds, "assign_ranks", lambda hosts: ranked.append(hosts) or assign_ranks(hosts))
        driver = begun(Limits.static(64), job, agents, a=32, b=32)
        for worker in agents.started:
            driver.done(worker)
        assert driver.is_over
        assert len(ranked) < 8

    def test_workers_that_do_not_come_up_are_named(self, job, agents):
        driver = Driver(Limits.static(3), job, agents, 30.0, lambda: agents.now)
        driver.found({"a": 3})
        driver.up("worker-1")
        agents.wait(30.0)
        assert agents.ended == [None]
        with pytest.raises(StartTimeoutError, match=r"of 3 ranks on a, these did not .* within 30 s: 0, 2;"):
            driver.check()


class TestWorlds:
    def test_the_first_world_is_known_when_its_workers_start(self, job, agents):
        begun(elastic(2), job, agents)
        assert published(job, 0) == Published(
            0, (("worker-0", "a"), ("worker-1", "a")), False, "rank 0 on host a joined, rank 1 on host a joined"
        )
        names = ("HOROVOD_ELASTIC", "HOROVOD_WORKER_ID", "HOROVOD_ROUND", "HOROVOD_NEWCOMER", "HOROVOD_RANK")
        assert [agents.started["worker-1"][name] for name in names] == ["1", "worker-1", "0", "0", "1"]

    def test_survivors_go_on_and_hear_why(self, job, agents):
        driver = begun(elastic(3), job, agents)
        driver.failed("worker-1", KILLED)
        world = published(job, 1)
        assert (world.workers, world.planned) == ((("worker-0", "a"), ("worker-2", "a")), False)
        assert world.text == "rank 1 on host a lost (was killed by signal 9)"
        driver.check()
        assert not driver.is_over

    def test_a_newcomer_gets_the_place_that_it_would_have_now(self, job, agents):
        driver = begun(elastic(1, most=3), job, agents, a=1)
        driver.found({"a": 1, "b": 2})
        first = agents.started["worker-1"]
        assert (first["HOROVOD_RANK"], first["HOROVOD_SIZE"], first["HOROVOD_NEWCOMER"]) == ("1", "2", "1")
        courses = [Course.of(agents.started[worker]) for worker in ("worker-0", "worker-1")]
        assert [course.requested is None for course in courses] == [False, True]  # the job was not, for a newcomer
        assert job.course.requested <= courses[0].placed + 1.0
        assert first["HOROVOD_ROUND"] == "0"

    def test_newcomers_that_are_ready_come_in_by_one_planned_change(self, job, agents):
        driver = begun(elastic(1, most=3), job, agents, a=1)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        driver.found({"a": 3})
        report(job, agents, "worker-1", 0, kind="ready")
        with pytest.raises(Exception, match="worlds/1"):
            published(job, 1)
        report(job, agents, "worker-2", 0, kind="ready")
        world = published(job, 1)
        assert ([worker for worker, _ in world.workers], world.planned) == (["worker-0", "worker-1", "worker-2"], True)

    def test_the_line_of_a_change_comes_when_it_is_over(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(3), job, agents)
        driver.failed("worker-2", KILLED)
        report(job, agents, "worker-0", 0, kind="formed", round=1, pause=0.123, lost=0)
        assert caplog.messages[-1] == (
            "world 1: 2 ranks, rank 2 on host a lost (was killed by signal 9), resumed after 0.12 s, 0 steps lost"
        )

    def test_newcomers_can_read_in_which_call_the_ranks_are(self, job, agents, caplog):
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
    def test_newcomers_can_read_that_the_ranks_are_between_two_calls(self, job, agents, reports, present):
        begun(elastic(2), job, agents)
        for number, (kind, round, call) in enumerate(reports):
            report(job, agents, "worker-0", number, kind=kind, round=round, call=call)
        assert job.store.get(CALL, 0.0) == present

    def test_a_world_that_begins_another_call_is_told_once(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(3), job, agents)
        driver.failed("worker-2", KILLED)
        for call in (1, 2):
            report(job, agents, "worker-0", call, kind="formed", round=1, call=call)
        assert len(caplog.messages) == 1

    def test_reports_are_taken_out_of_the_store(self, job, agents):
        begun(elastic(2), job, agents)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        with pytest.raises(Exception, match="reports/worker-0/0"):
            job.store.get(report_key("worker-0", 0), 0.0)

    @pytest.mark.parametrize("is_taken_between", [False, True])
    def test_a_report_that_is_sent_again_counts_once(self, job, agents, caplog, is_taken_between):
        """A client sends it again when the answer is lost with a connection."""
        caplog.set_level("INFO", "executors.driver")
        begun(elastic(2), job, agents)
        for _ in range(2):
            job.store.set(report_key("worker-1", 0), Report("draining").encode())
            if is_taken_between:
                agents.call()
        agents.call()
        assert len(caplog.records) == 1
        assert job.store.peek(report_key("worker-1", 0)) is None

    def test_a_report_of_a_stranger_or_of_an_unknown_kind_changes_nothing(self, job, agents):
        begun(elastic(2), job, agents)
        report(job, agents, "worker-9", 0, kind="draining")
        report(job, agents, "worker-0", 0, kind="singing")
        with pytest.raises(Exception, match="worlds/1"):
            published(job, 1)

    def test_losses_before_a_world_has_formed_are_told_together(self, job, agents):
        driver = begun(elastic(4), job, agents)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        driver.failed("worker-3", KILLED)
        driver.failed("worker-1", EXITED)
        assert published(job, 2).text == (
            "rank 1 on host a lost (ended with exit code 3), rank 3 on host a lost (was killed by signal 9)"
        )

    def test_an_error_of_the_driver_itself_is_not_hidden(self, job, agents, monkeypatch):
        begun(elastic(2), job, agents)
        monkeypatch.setattr("executors.driver.WorldFormed", lambda round: {}["missing"])
        with pytest.raises(KeyError, match="missing"):
            report(job, agents, "worker-0", 0, kind="formed", round=0)


class TestLeaving:
    def test_a_worker_that_was_asked_to_end_is_left_out_and_its_end_is_no_failure(self, job, agents):
        driver = begun(elastic(3), job, agents)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        report(job, agents, "worker-1", 0, kind="draining")
        world = published(job, 1)
        assert (world.planned, world.text) == (True, "rank 1 on host a left")
        driver.failed("worker-1", EXITED)
        driver.done("worker-0")
        driver.done("worker-2")
        driver.check()
        assert driver.order == ("worker-0", "worker-2")

    def test_who_leaves_is_told_by_rank(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(2, most=3), job, agents, a=1, b=1)
        driver.found({"a": 1, "b": 2})
        report(job, agents, "worker-1", 0, kind="draining")
        report(job, agents, "worker-2", 0, kind="draining")
        assert [line.partition(";")[0] for line in caplog.messages] == [
            "rank 1 on host b was asked to end",
            "worker-2 on host b was asked to end",
        ]

    def test_the_end_of_a_newcomer_that_was_stopped_is_no_failure(self, job, agents):
        driver = begun(elastic(1, most=2, may_find_hosts=False), job, agents, a=1)
        driver.found({"a": 1, "b": 1})
        driver.found({"a": 1})
        assert agents.stopped == ["worker-1"]
        driver.failed("worker-1", Failure(Kind.EXCEPTION, "raised while it was ended"))
        driver.failed("worker-0", KILLED)
        agents.wait(1.0)
        with pytest.raises(WorkerError, match="last failure: worker-0") as caught:
            driver.check()
        assert caught.value.rank == 0

    def test_the_end_of_one_that_the_others_have_left_behind_is_no_failure(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(2), job, agents)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        report(job, agents, "worker-1", 0, kind="behind")
        assert published(job, 1).workers == (("worker-0", "a"),)
        assert list(agents.started) == ["worker-0", "worker-1", "worker-2"]
        driver.failed("worker-1", Failure(Kind.SHUT_DOWN, "ended with exit code 1", 1))
        assert caplog.messages == ["rank 1 on host a leaves: the other ranks are not in its call of elastic functions"]
        driver.done("worker-0")
        driver.check()
        assert driver.order == ("worker-0",)

    def test_the_others_wait_for_another_where_they_are_too_few(self, job, agents):
        driver = begun(elastic(2, least=2), job, agents)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        report(job, agents, "worker-1", 0, kind="behind")
        driver.failed("worker-1", Failure(Kind.SHUT_DOWN, "ended with exit code 1", 1))
        report(job, agents, "worker-2", 0, kind="ready")
        world = published(job, 1)
        assert world.workers == (("worker-0", "a"), ("worker-2", "a"))
        assert world.text == "rank 1 on host a left, rank 1 on host a joined"
        driver.done("worker-0")
        driver.done("worker-2")
        driver.check()
        assert driver.order == ("worker-0", "worker-2")

    def test_a_host_that_is_no_longer_found_drains(self, job, agents):
        driver = begun(elastic(2), job, agents, a=1, b=1)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        driver.found({"a": 1})
        assert published(job, 1).text == "rank 1 on host b left"

    @pytest.mark.parametrize(
        ("least", "text", "planned"),
        [
            (1, "go on from the last commit", [True, False]),
            (2, "are too few to go on alone, and lose the host then", []),
        ],
    )
    def test_ranks_that_come_to_no_commit_before_their_host_is_gone(self, job, agents, caplog, least, text, planned):
        driver = begun(elastic(3, least=least), job, agents, a=1, b=2)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        driver.leaves_in(60.0, "b")
        driver.found({"a": 1})
        driver.leaves_in(5.0, "b")
        agents.wait(3.9)
        assert not caplog.records
        agents.wait(0.1)
        [line] = caplog.messages
        assert re.sub(r"at \d\d:\d\d:\d\d", "at T", line) == (
            "rank 1, rank 2 on host b came to no commit since the notice that the host will be gone at T; the others "
            + text
        )
        assert [published(job, number + 1).planned for number in range(len(planned))] == planned
        driver.host_lost("b", "preempted")
        driver.failed("worker-1", KILLED)
        assert len(caplog.messages) == 1

    def test_a_host_that_is_lost_takes_its_workers_with_it(self, job, agents):
        driver = begun(elastic(3), job, agents, a=1, b=2)
        driver.host_lost("b", "its agent was lost")
        world = published(job, 1)
        assert world.workers == (("worker-0", "a"),)
        assert world.text == "rank 1 on host b lost (its agent was lost), rank 2 on host b lost (its agent was lost)"


class TestLossesThatOthersNotice:
    """The ranks of a host notice the end of a process before its agent does."""

    def lose(self, job, agents, *ranks, worker="worker-0", round=0):
        report(job, agents, worker, round, kind="lost", round=round, ranks=ranks, text="gone")

    def test_the_others_go_on_at_once_and_the_line_waits_for_the_reason(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(3), job, agents)
        self.lose(job, agents, 2)
        assert published(job, 1).workers == (("worker-0", "a"), ("worker-1", "a"))
        report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
        assert not caplog.messages
        driver.failed("worker-2", KILLED)
        assert caplog.messages == [
            "world 1: 2 ranks, rank 2 on host a lost (was killed by signal 9), resumed after 0.02 s, 0 steps lost"
        ]
        assert not agents.killed

    @pytest.mark.parametrize("is_noticed_first", [True, False])
    def test_one_that_ends_with_exit_code_0_is_done_whoever_notices_it_first(
        self, job, agents, caplog, is_noticed_first
    ):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(3, cooldown=Cooldown(1.0, 1.0)), job, agents)
        report(job, agents, "worker-1", 0, kind="formed", round=0)
        if is_noticed_first:
            self.lose(job, agents, 2)
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
        driver.failed("worker-0", KILLED)
        driver.failed("worker-1", KILLED)
        driver.check()

    def test_the_line_does_not_wait_for_ever(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        begun(elastic(3), job, agents)
        self.lose(job, agents, 2)
        report(job, agents, "worker-0", 1, kind="formed", round=1, pause=0.02)
        agents.wait(1.0)
        assert "rank 2 on host a lost (ended), resumed" in caplog.messages[-1]

    def test_workers_hear_that_a_driver_closes_early(self, job, agents):
        driver = begun(elastic(3), job, agents)
        driver.close()
        assert published(job, 1).is_over

    def test_a_driver_that_closes_when_the_job_is_over_says_nothing_more(self, job, agents):
        driver = begun(elastic(1), job, agents)
        driver.done("worker-0")
        driver.close()
        assert published(job, 1).text == "the job is done"
        with pytest.raises(Exception, match="worlds/2"):
            published(job, 2)

    def test_a_driver_that_closes_tells_all(self, job, agents, caplog):
        caplog.set_level("INFO", "executors")
        driver = begun(elastic(3), job, agents)
        self.lose(job, agents, 2)
        report(job, agents, "worker-0", 1, kind="formed", round=1)
        driver.close()
        assert "world 1: 2 ranks" in caplog.messages[-1]

    def test_a_second_report_and_one_of_an_earlier_world_change_nothing(self, job, agents):
        driver = begun(elastic(3), job, agents)
        self.lose(job, agents, 2)
        self.lose(job, agents, 2, worker="worker-1")
        driver.failed("worker-2", KILLED)
        with pytest.raises(Exception, match="worlds/2"):
            published(job, 2)

    @pytest.mark.parametrize("limits", [{"least": 3, "may_find_hosts": False}, {"resets": 0}, {"failures": 0}])
    def test_a_job_that_may_end_waits_for_the_reason(self, job, agents, limits):
        driver = begun(elastic(3, **limits), job, agents)
        self.lose(job, agents, 2)
        with pytest.raises(Exception, match="worlds/1"):
            published(job, 1)
        driver.failed("worker-2", KILLED)
        agents.wait(1.0)
        with pytest.raises(WorkerError, match="killed by signal 9"):
            driver.check()

    def test_a_later_end_of_the_job_has_the_reason(self, job, agents):
        driver = begun(elastic(2, may_find_hosts=False), job, agents)
        self.lose(job, agents, 1)
        driver.failed("worker-1", EXITED)
        driver.failed("worker-0", KILLED)
        agents.wait(1.0)
        with pytest.raises(WorkerError) as caught:
            driver.check()
        assert caught.value.exit_code == -9

    def test_an_exception_of_the_user_still_ends_the_job(self, job, agents):
        driver = begun(elastic(3), job, agents)
        self.lose(job, agents, 2)
        driver.failed("worker-2", Failure(Kind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
        assert agents.ended == ["worker-2"]
        with pytest.raises(WorkerError, match="rank 2 on a ended with exit code 1"):
            driver.check()


class TestExceptionsThatWorkersReport:
    """Their standard error may show nothing of them."""

    def raise_in(self, job, agents, worker, number=0, text="KeyError: 'user bug'"):
        report(job, agents, worker, number, kind="raised", text=text)

    def test_the_end_of_the_worker_ends_the_job_with_the_exception(self, job, agents):
        driver = begun(elastic(3), job, agents)
        self.raise_in(job, agents, "worker-1")
        assert not driver.is_over
        driver.failed("worker-1", Failure(Kind.EXIT, "ended with exit code 1", 1, ("CRASH",)))
        assert agents.ended == ["worker-1"]
        text = "rank 1 on a raised KeyError: 'user bug', and ended with exit code 1"
        with pytest.raises(WorkerError, match=text) as caught:
            driver.check()
        assert (caught.value.exit_code, caught.value.last_lines) == (1, ("CRASH",))

    def test_others_that_notice_the_end_first_do_not_hide_it(self, job, agents):
        driver = begun(elastic(3), job, agents)
        self.raise_in(job, agents, "worker-1")
        report(job, agents, "worker-0", 0, kind="lost", round=0, ranks=(1,), text="gone")
        driver.failed("worker-1", Failure(Kind.EXIT, "ended with exit code 1", 1, ("CRASH",)))
        with pytest.raises(WorkerError, match="raised KeyError") as caught:
            driver.check()
        assert caught.value.last_lines == ("CRASH",)

    def test_one_that_is_caught_is_no_failure(self, job, agents):
        driver = begun(elastic(2), job, agents)
        self.raise_in(job, agents, "worker-1")
        driver.done("worker-1")
        driver.done("worker-0")
        driver.check()

    def test_one_that_was_caught_is_not_the_reason_of_a_later_end(self, job, agents):
        driver = begun(elastic(2), job, agents)
        self.raise_in(job, agents, "worker-1")
        self.raise_in(job, agents, "worker-1", 1, text="")
        driver.failed("worker-1", KILLED)
        assert not driver.is_over
        assert published(job, 1).text == "rank 1 on host a lost (was killed by signal 9)"

    @pytest.mark.parametrize("failure", [KILLED, EXITED])
    def test_one_that_does_not_explain_the_end_is_told_and_no_more(self, job, agents, failure):
        driver = begun(elastic(2), job, agents)
        self.raise_in(job, agents, "worker-1")
        driver.failed("worker-1", failure)
        assert not driver.is_over
        text = f"rank 1 on host a lost ({failure.text}; before, it raised KeyError: 'user bug')"
        assert published(job, 1).text == text

    def test_one_that_ends_so_slowly_that_the_others_accuse_its_rank_is_the_reason(self, job, agents):
        driver = begun(elastic(2), job, agents)
        self.raise_in(job, agents, "worker-1")
        report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(1,), text="rank 1 did not answer")
        agents.wait(1.0)
        with pytest.raises(WorkerError, match="raised KeyError: 'user bug', and no longer answered"):
            driver.check()

    def test_one_that_nobody_catches_ends_the_job_though_the_process_does_not_end(self, job, agents):
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
    def test_the_end_of_its_process_counts_where_it_comes_in_time(self, job, agents, end):
        driver = begun(elastic(2), job, agents)
        report(job, agents, "worker-1", 0, kind="raised", text="KeyError: 'user bug'", is_uncaught=True)
        end(driver)
        agents.wait(10.0)
        assert not driver.is_over

    def test_a_newcomer_that_does_not_end_is_killed(self, job, agents):
        driver = begun(elastic(1, most=2), job, agents, a=1)
        report(job, agents, "worker-0", 0, kind="formed", round=0)
        driver.found({"a": 1, "b": 1})
        report(job, agents, "worker-1", 0, kind="raised", text="KeyError: 'user bug'", is_uncaught=True)
        agents.wait(5.0)
        assert agents.killed == ["worker-1"]
        assert not driver.is_over

    def test_the_error_of_a_function_stays_as_it_is(self, job, agents):
        driver = begun(elastic(2), job, agents)
        self.raise_in(job, agents, "worker-1")
        driver.failed("worker-1", RAISED)
        with pytest.raises(KeyError):
            driver.check()


class TestNewcomersThatCannotCome:
    """A failure of their host; the ranks that train go on."""

    BAD = Failure(Kind.EXCEPTION, "ended with exit code 1", 1, ("ImportError: no module",), ImportError("no module"))

    def grown(self, job, agents, **formed):
        driver = begun(elastic(1, most=2), job, agents, a=1)
        formed = {"call": 1, "version": "1.0", "layout": "abc", **formed}
        report(job, agents, "worker-0", 0, kind="formed", round=0, **formed)
        driver.found({"a": 1, "b": 1})
        return driver

    def test_an_exception_before_it_was_a_rank(self, job, agents, caplog):
        driver = self.grown(job, agents)
        driver.failed("worker-1", self.BAD)
        assert not driver.is_over
        assert agents.killed == ["worker-1"]
        assert caplog.messages == [
            "worker-1 on host b failed before it could train; the others go on: it ended with exit code 1. "
            "The last lines of its standard error:\n    ImportError: no module"
        ]
        driver.done("worker-0")
        driver.check()

    def test_a_later_failure_of_the_job_is_its_own(self, job, agents):
        driver = self.grown(job, agents)
        driver.failed("worker-1", self.BAD)
        driver.failed("worker-0", KILLED)
        agents.wait(1.0)
        with pytest.raises(WorkerError, match="every worker with the state of the training is lost") as caught:
            driver.check()
        assert caught.value.rank == 0

    def test_an_exception_in_a_world_that_has_not_formed(self, job, agents):
        driver = self.grown(job, agents)
        report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
        assert len(published(job, 1).workers) == 2
        driver.failed("worker-1", self.BAD)
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
    def test_one_whose_end_the_others_notice_first_is_told_of_with_the_reason(self, job, agents, caplog, explain, text):
        driver = self.grown(job, agents)
        report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
        report(job, agents, "worker-0", 1, kind="lost", round=1, ranks=(1,), text="gone")
        assert published(job, 2).workers == (("worker-0", "a"),)
        report(job, agents, "worker-0", 2, kind="formed", round=2, call=1)
        assert not caplog.messages
        explain(driver, agents)
        assert caplog.messages == [f"worker-1 on host b failed before it could train; the others go on: it {text}"]

    def test_one_that_has_ended_with_success_after_all_has_not_failed(self, job, agents, caplog):
        driver = self.grown(job, agents)
        report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
        report(job, agents, "worker-0", 1, kind="lost", round=1, ranks=(1,), text="gone")
        report(job, agents, "worker-0", 2, kind="formed", round=2, call=1)
        driver.done("worker-1")
        assert not caplog.messages

    def test_before_anybody_has_trained_an_exception_ends_the_job(self, job, agents):
        driver = begun(elastic(2), job, agents)
        driver.failed("worker-1", self.BAD)
        assert driver.is_over

    def test_an_exception_of_a_newcomer_that_has_trained_ends_the_job(self, job, agents):
        driver = self.grown(job, agents)
        report(job, agents, "worker-1", 0, kind="ready", call=1, version="1.0", layout="abc")
        report(job, agents, "worker-0", 1, kind="formed", round=1, call=1)
        driver.failed("worker-1", self.BAD)
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
    def test_one_that_cannot_share_the_state(self, job, agents, caplog, ready, text):
        driver = self.grown(job, agents)
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
    def test_states_that_cannot_be_compared_are_compared_later(self, job, agents, formed, ready):
        self.grown(job, agents, **formed)
        report(job, agents, "worker-1", 0, kind="ready", **{"call": 1, "version": "1.0", "layout": "abc", **ready})
        assert len(published(job, 1).workers) == 2


class TestAccusations:
    def test_a_silent_rank_is_killed_after_a_moment(self, job, agents):
        begun(elastic(3), job, agents)
        report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(2,), text="rank 2 did not answer")
        assert agents.killed == []
        agents.wait(1.0)
        assert agents.killed == ["worker-2"]
        assert published(job, 1).text == "rank 2 on host a lost (no longer answered)"

    def test_a_silent_rank_that_the_next_world_was_planned_with(self, job, agents):
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

    def test_a_report_about_a_world_that_the_ranks_have_left_by_plan_is_late(self, job, agents):
        driver = begun(elastic(2, most=3), job, agents, a=2)
        driver.found({"a": 3})
        report(job, agents, "worker-2", 0, kind="ready")
        report(job, agents, "worker-0", 0, kind="formed", round=1)
        report(job, agents, "worker-1", 0, kind="failed", round=0, ranks=(0,), text="rank 0 did not answer")
        agents.wait(1.0)
        assert agents.killed == []

    def test_its_end_may_be_known_by_then(self, job, agents):
        driver = begun(elastic(3), job, agents)
        report(job, agents, "worker-0", 0, kind="failed", round=0, ranks=(2,), text="rank 2 is gone")
        driver.failed("worker-2", KILLED)
        agents.wait(1.0)
        assert agents.killed == []
        assert published(job, 1).text == "rank 2 on host a lost (was killed by signal 9)"

    def test_a_world_that_failed_for_no_known_rank_is_made_again(self, job, agents):
        begun(elastic(2), job, agents)
        for worker in ("worker-0", "worker-1"):
            report(job, agents, worker, 0, kind="failed", round=0, text="the engine broke")
        agents.wait(1.0)
        assert published(job, 1).text == "the same ranks again"
        with pytest.raises(Exception, match="worlds/2"):
            published(job, 2)


class TestTheEnd:
    def test_an_exception_of_the_user_ends_an_elastic_job_at_once(self, job, agents):
        driver = begun(elastic(3), job, agents)
        driver.failed("worker-1", Failure(Kind.EXCEPTION, "ended with exit code 1", 1, ("ValueError: bad",)))
        assert agents.ended == ["worker-1"]
        assert published(job, 1).is_over
        with pytest.raises(WorkerError, match="rank 1 on a ended with exit code 1"):
            driver.check()

    def test_too_many_resets(self, job, agents):
        driver = begun(elastic(3, resets=1), job, agents)
        driver.failed("worker-1", KILLED)
        driver.failed("worker-2", EXITED)
        agents.wait(1.0)
        assert agents.ended == ["worker-1"]
        with pytest.raises(WorkerError, match=r"the number of resets exceeded its limit of 1 .*exit code 3") as caught:
            driver.check()
        assert caught.value.exit_code == 3

    def test_too_few_workers_within_the_timeout(self, job, agents):
        driver = Driver(elastic(2, least=2, timeout=60.0), job, agents, 30.0, lambda: agents.now)
        driver.found({"a": 1})
        agents.wait(61.0)
        assert driver.is_over
        assert agents.started == {}
        with pytest.raises(ExecutorError, match=r"0 of at least 2 workers .*a: 1 slot.* elastic timeout of 60 s"):
            driver.check()

    def test_no_host_at_all_within_the_timeout(self, job, agents):
        driver = Driver(elastic(1, timeout=60.0), job, agents, 30.0, lambda: agents.now)
        driver.found({})
        agents.wait(61.0)
        with pytest.raises(ExecutorError, match=r"0 of at least 1 workers .*none was found.* elastic timeout of 60 s"):
            driver.check()

    def test_a_newcomer_that_does_not_come_up_is_a_failure_of_its_host(self, job, agents):
        driver = begun(elastic(1, most=2, cooldown=Cooldown(10.0, 10.0)), job, agents, a=1)
        driver.found({"a": 1, "b": 1})
        agents.wait(30.0)
        assert agents.killed == ["worker-1"]
        assert not driver.is_over
        agents.wait(10.5)
        assert "worker-2" in agents.started

    def test_the_timeout_of_the_job_is_that_of_its_workers(self, job, agents):
        begun(elastic(2, timeout=90.0), job, agents)
        assert agents.started["worker-0"]["HOROVOD_ELASTIC_TIMEOUT"] == "90.0"


def test_published_worlds_and_reports_are_json():
    world = Published(3, (("worker-1", "a"),), True, "text")
    assert Published.decode(world.encode()) == world
    assert json.loads(Report("ready").encode())["kind"] == "ready"
