"""The driver's side of a job, where a stand-in is Spark."""

import pickle
import queue
import threading
import time
from contextlib import contextmanager

import pytest

from collectives.api import PeerLostError
from executors.agents.spark import stage, waiting
from executors.agents.spark.connection import TaskIdentity
from executors.agents.spark.plan import SparkOptions
from executors.agents.spark.stage import StageFinished
from executors.api import ExecutorError, StartTimeoutError, WorkerError
from executors.driver.outcome import observe
from executors.job.job import Job


class SlowSpark:
    """A session and its job, which Spark has only ``deaf`` cancellations after compute() was called."""

    def __init__(self, monkeypatch, deaf=0):
        monkeypatch.setattr(stage, "inheritable_thread_target", lambda session: lambda run: run)
        self.spark = self
        self.deaf = deaf
        self.entered, self.may_start, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self.started = 0

    @contextmanager
    def tagged(self, tag):
        self.entered.set()
        assert self.may_start.wait(30)
        yield

    def compute(self):
        self.started += 1
        assert self.cancelled.wait(30)
        raise RuntimeError("cancelled")

    def cancel(self, tag):
        self.may_start.set()
        if self.started:
            self.deaf -= 1
        if self.deaf < 0:
            self.cancelled.set()


class TestCancellation:
    def test_what_has_not_begun_does_not_begin(self, monkeypatch):
        spark = SlowSpark(monkeypatch)
        with stage.Stage(spark, spark.compute, queue.SimpleQueue().put):
            assert spark.entered.wait(30)
        assert spark.started == 0

    def test_it_is_repeated_until_spark_has_the_job(self, monkeypatch):
        spark = SlowSpark(monkeypatch, deaf=3)
        spark.may_start.set()
        events = queue.SimpleQueue()
        with stage.Stage(spark, spark.compute, events.put):
            self.until_started(spark)
        assert str(events.get(timeout=0).error) == "cancelled"

    def test_a_spark_that_does_not_answer_is_given_up(self, monkeypatch, caplog):
        monkeypatch.setattr(stage, "CANCEL_SECONDS", 0.1)
        spark, answer = SlowSpark(monkeypatch), threading.Event()
        monkeypatch.setattr(spark, "cancel", lambda tag: answer.wait(30))
        spark.may_start.set()
        with stage.Stage(spark, spark.compute, queue.SimpleQueue().put):
            self.until_started(spark)
        assert [record.message for record in caplog.records] == [
            "Spark did not confirm that it cancelled the job; the job may still run"
        ]
        spark.cancelled.set()
        answer.set()

    def until_started(self, spark):
        while not spark.started:  # what has not begun is not cancelled
            spark.entered.wait(0.01)

    def fail_once_started(self, spark):
        self.until_started(spark)
        raise KeyError("the failure")

    def test_a_spark_that_cannot_be_told_is_no_other_failure(self, monkeypatch):
        def cancel(tag):
            raise RuntimeError("no gateway")

        def warning(text, *values):
            warnings.append(text % values)
            spark.cancelled.set()  # not before: the stage may end, and the test with it, as soon as Spark's job has

        spark, warnings = SlowSpark(monkeypatch), []
        monkeypatch.setattr(spark, "cancel", cancel)
        monkeypatch.setattr(stage.logger, "warning", warning)
        spark.may_start.set()
        running = stage.Stage(spark, spark.compute, queue.SimpleQueue().put)
        with pytest.raises(KeyError, match="the failure"), running:
            self.fail_once_started(spark)
        assert warnings == ["the request to cancel the Spark job failed (no gateway)"]


OPTIONS = SparkOptions(start_timeout=60.0, grace=0.0)


def values_after(*reports, options=OPTIONS, busy=bool):
    """The result of a wait for two ranks, of which the ``reports`` come first."""
    waits = waiting.WorkerWait(Job(2), options)
    for name, content in reports:
        getattr(waits, name)(content)
    return waits.values(busy)


def outcome(rank, error=None):
    def function():
        if error:
            raise error
        return f"value of {rank}"

    return pickle.dumps(observe(function, rank, "host"))


def finished(**outcomes):
    """The end of Spark's job with outcomes of the ranks r0, r1."""
    return "finished", StageFinished(list(outcomes.values()))


def stage_failed(text):
    return "finished", StageFinished(error=RuntimeError(text))


CALLERS = [TaskIdentity(rank, f"host-{rank}", f"name of {rank}") for rank in (0, 1)]
CONNECTED = [("connected", caller) for caller in CALLERS]
LOST = "lost", CALLERS[1]
VALUES = [outcome(0), outcome(1)]
CAUSE = outcome(0, KeyError("enough"))
CONSEQUENCE = outcome(0, PeerLostError("rank 1 is gone"))


class TestEnd:
    def test_nobody_came_and_nothing_is_there(self):
        assert values_after(finished()) == []

    def test_values_are_in_the_order_of_ranks(self):
        assert values_after(*CONNECTED, finished(r1=VALUES[1], r0=VALUES[0])) == ["value of 0", "value of 1"]

    def test_workers_that_all_ended_for_nothing_are_no_table_without_rows(self):
        with pytest.raises(
            ExecutorError, match="all workers ended because their tasks lost the connection to this process"
        ):
            values_after(*CONNECTED, finished())

    def test_a_rank_without_an_outcome_is_no_success(self):
        with pytest.raises(ExecutorError, match=r"Spark returned no result of ranks \[1\]"):
            values_after(*CONNECTED, finished(r0=VALUES[0]))

    @pytest.mark.parametrize("end", [finished(), stage_failed("results are too large"), finished(r1=VALUES[1])])
    def test_values_that_were_delivered_are_the_result_however_spark_ends(self, end):
        delivered = [("delivered", value) for value in VALUES]
        assert values_after(*CONNECTED, *delivered, LOST, end) == ["value of 0", "value of 1"]

    def test_the_values_of_tasks_without_a_connection_come_with_the_end(self):
        waits = waiting.WorkerWait(Job(2), OPTIONS)
        waits.connected(CALLERS[0])
        waits.delivered(VALUES[0])
        assert waits.missing() == [1]
        waits.finished(finished(r1=VALUES[1])[1])
        assert waits.values(bool) == ["value of 0", "value of 1"]

    def test_a_value_that_spark_cannot_fetch_is_the_failure(self):
        end = "finished", StageFinished(error=ExecutorError("the results of ranks [1] were made"))
        with pytest.raises(ExecutorError, match=r"\Athe results of ranks \[1\] were made\Z"):
            values_after(CONNECTED[0], ("delivered", VALUES[0]), end)

    @pytest.mark.parametrize(
        "end", [finished(), finished(r0=VALUES[0]), finished(r0=CONSEQUENCE), stage_failed("Spark's")]
    )
    def test_a_lost_task_is_the_failure(self, end):
        with pytest.raises(WorkerError, match="the task of rank 1 on name of 1 was lost"):
            values_after(*CONNECTED, LOST, end)

    def test_a_lost_task_is_the_failure_if_spark_says_nothing(self, monkeypatch):
        monkeypatch.setattr(waiting, "END_NEWS_SECONDS", 0.01)
        with pytest.raises(WorkerError, match="the task of rank 1 on name of 1 was lost"):
            values_after(*CONNECTED, LOST)

    def test_a_line_that_is_lost_is_nothing_where_there_is_an_outcome(self):
        end = finished(r0=VALUES[0], r1=VALUES[1])
        assert values_after(*CONNECTED, LOST, end) == ["value of 0", "value of 1"]
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, LOST, finished(r0=CAUSE))

    @pytest.mark.parametrize("later", [LOST, stage_failed("Spark's"), finished(), finished(r1=VALUES[1])])
    def test_what_follows_a_failure_does_not_hide_it(self, later):
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, ("failed", CAUSE), later)

    def test_a_cause_that_comes_after_a_loss_is_the_failure(self):
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, LOST, ("failed", CAUSE), stage_failed("Spark's"))

    def test_a_consequence_hides_nothing(self):
        with pytest.raises(WorkerError, match="the task of rank 1"):
            values_after(*CONNECTED, ("failed", CONSEQUENCE), LOST, stage_failed("Spark's"))
        with pytest.raises(ExecutorError, match="Spark could not run the workers: no memory"):
            values_after(*CONNECTED, ("failed", CONSEQUENCE), stage_failed("no memory"))
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, ("failed", outcome(1, PeerLostError("0"))), finished(r0=CAUSE))

    @pytest.mark.parametrize("seconds", [0.0, 0.1])
    def test_where_all_ranks_have_only_noticed_something_spark_has_the_cause(self, seconds):
        waits = waiting.WorkerWait(Job(2), OPTIONS)
        for rank, caller in enumerate(CALLERS):
            noticed = outcome(rank, PeerLostError("the rows broke off"))
            waits.connected(caller)
            waits.failed(noticed)
            waits.delivered(noticed)
        waits.after(seconds, lambda: waits.finished(stage_failed("no memory")[1]))
        with pytest.raises(ExecutorError, match="Spark could not run the workers: no memory"):
            waits.values(bool)

    def test_what_all_ranks_noticed_is_the_failure_if_spark_says_nothing(self, monkeypatch):
        monkeypatch.setattr(waiting, "END_NEWS_SECONDS", 0.01)
        noticed = [("failed", outcome(rank, PeerLostError("the rows broke off"))) for rank in (0, 1)]
        with pytest.raises(PeerLostError, match="the rows broke off"):
            values_after(*CONNECTED, *noticed)

    def test_the_loss_of_a_rank_is_likelier_than_what_it_noticed_before(self):
        noticed = "failed", outcome(1, PeerLostError("rank 0 is gone"))
        with pytest.raises(WorkerError, match="the task of rank 1"):
            values_after(*CONNECTED, noticed, LOST, stage_failed("Spark's"))
        with pytest.raises(WorkerError, match="the task of rank 0"):
            values_after(*CONNECTED, noticed, ("lost", CALLERS[0]), LOST, stage_failed("Spark's"))

    def test_the_cause_of_a_rank_is_likelier_than_what_it_noticed_before(self):
        noticed, cause = outcome(1, PeerLostError("rank 0 is gone")), outcome(1, KeyError("enough"))
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, ("failed", noticed), ("failed", cause), stage_failed("Spark's"))
        with pytest.raises(KeyError, match="enough"):
            values_after(*CONNECTED, ("failed", noticed), finished(r1=cause))

    def test_an_exception_that_cannot_be_shown_is_raised(self):
        with pytest.raises(Unshowable):
            values_after(*CONNECTED, ("failed", outcome(0, Unshowable())), stage_failed("Spark's"))

    def test_reports_that_wait_come_before_the_end_of_the_time(self):
        waits = waiting.WorkerWait(Job(2), SparkOptions(start_timeout=1e-9))
        for name, content in (*CONNECTED, finished(r0=VALUES[0], r1=VALUES[1])):
            getattr(waits, name)(content)
        assert waits.values(bool) == ["value of 0", "value of 1"]


class Unshowable(Exception):
    def __repr__(self):
        raise RuntimeError("broken")


class TestFailure:
    def test_one_that_spark_does_not_tell_of_ends_the_wait(self, monkeypatch):
        monkeypatch.setattr(waiting, "FAILURE_SECONDS", 0.01)
        with pytest.raises(KeyError, match="enough"):
            values_after(("failed", outcome(1, PeerLostError("0"))), ("failed", CAUSE), busy=lambda: True)


class TestStartTimeout:
    def test_a_stage_that_waits_is_given_up(self):
        with pytest.raises(StartTimeoutError, match=r"0 of 2 workers started within 0\.01 s"):
            values_after(options=SparkOptions(start_timeout=0.01))

    def test_a_stage_whose_workers_are_there_is_not_given_up(self, monkeypatch):
        monkeypatch.setattr(waiting, "END_NEWS_SECONDS", 0.1)
        with pytest.raises(WorkerError, match="the task of rank 1"):
            values_after(*CONNECTED, LOST, options=SparkOptions(start_timeout=0.01))

    def test_a_user_who_waits_long_is_told(self, monkeypatch, caplog):
        monkeypatch.setattr(waiting, "NOTICE_SECONDS", 0.01)
        with pytest.raises(StartTimeoutError):
            values_after(options=SparkOptions(start_timeout=0.1))
        assert [record.message.partition(";")[0] for record in caplog.records] == ["0 of 2 workers started so far"]

    def test_one_that_runs_gets_as_long_again_for_what_comes_next(self):
        looks = iter([True, True, False])
        with pytest.raises(StartTimeoutError):
            values_after(options=SparkOptions(start_timeout=0.01), busy=lambda: next(looks))
        assert next(looks, None) is None

    def test_the_time_of_a_stage_is_its_own(self):
        """That of the first one, which has no rows, ends while the second one waits."""

        def end_first(busy=lambda: False):
            waits.after(0.5, lambda: waits.finished(finished()[1]))
            return waits.values(busy)

        waits = waiting.WorkerWait(Job(2), SparkOptions(start_timeout=2.0))
        assert end_first() == []
        begin = time.monotonic()
        with pytest.raises(StartTimeoutError):
            waits.values(bool)
        assert time.monotonic() - begin >= 2.0
