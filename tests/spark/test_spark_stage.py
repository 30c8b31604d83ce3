"""The driver's side of a job, where a stand-in is Spark."""

import pickle
import queue
import threading
from contextlib import contextmanager

import pyarrow
import pytest

from collectives.api import PeerLostError
from executors.api import ExecutorError, StartTimeoutError, WorkerError
from executors.outcome import observe
from executors.spark import job
from executors.spark.connection import TaskIdentity
from executors.spark.job import SparkOptions


class SlowSpark:
    """A session and a DataFrame at once; has the job only ``deaf`` cancellations after toArrow() was called."""

    def __init__(self, monkeypatch, deaf=0):
        monkeypatch.setattr(job, "inheritable_thread_target", lambda session: lambda run: run)
        self.spark = self
        self.deaf = deaf
        self.entered, self.may_start, self.cancelled = threading.Event(), threading.Event(), threading.Event()
        self.started = 0

    def mapInArrow(self, task, schema, barrier):
        return self

    @contextmanager
    def tagged(self, tag):
        self.entered.set()
        assert self.may_start.wait(30)
        yield

    def toArrow(self):
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
        with job._Stage(spark, spark, None, queue.SimpleQueue()):
            assert spark.entered.wait(30)
        assert spark.started == 0

    def test_it_is_repeated_until_spark_has_the_job(self, monkeypatch):
        spark = SlowSpark(monkeypatch, deaf=3)
        spark.may_start.set()
        events = queue.SimpleQueue()
        with job._Stage(spark, spark, None, events):
            while not spark.started:
                spark.entered.wait(0.01)
        assert str(events.get(timeout=0).error) == "cancelled"

    def test_a_spark_that_does_not_answer_is_given_up(self, monkeypatch, caplog):
        monkeypatch.setattr(job, "CANCEL_SECONDS", 0.1)
        spark, answer = SlowSpark(monkeypatch), threading.Event()
        monkeypatch.setattr(spark, "cancel", lambda tag: answer.wait(30))
        spark.may_start.set()
        with job._Stage(spark, spark, None, queue.SimpleQueue()):
            pass
        assert [record.message for record in caplog.records] == [
            "Spark did not confirm that it cancelled the job; the job may still run"
        ]
        spark.cancelled.set()
        answer.set()

    def fail_once_started(self, spark):
        while not spark.started:  # what has not begun is not cancelled
            spark.entered.wait(0.01)
        raise KeyError("the failure")

    def test_a_spark_that_cannot_be_told_is_no_other_failure(self, monkeypatch):
        def cancel(tag):
            raise RuntimeError("no gateway")

        def warning(text, *values):
            warnings.append(text % values)
            spark.cancelled.set()  # not before: the stage may end, and the test with it, as soon as Spark's job has

        spark, warnings = SlowSpark(monkeypatch), []
        monkeypatch.setattr(spark, "cancel", cancel)
        monkeypatch.setattr(job.logger, "warning", warning)
        spark.may_start.set()
        stage = job._Stage(spark, spark, None, queue.SimpleQueue())
        with pytest.raises(KeyError, match="the failure"), stage:
            self.fail_once_started(spark)
        assert warnings == ["the request to cancel the Spark job failed (no gateway)"]


def result_of(*events):
    """The result of a wait for two ranks after ``events``."""
    waiting = queue.SimpleQueue()
    for event in events:
        waiting.put(event)
    return job._Wait(lambda: False, 2, SparkOptions(start_timeout=60.0, grace=0.0), waiting).result()


def outcome(rank, error=None):
    def function():
        if error:
            raise error

    return pickle.dumps(observe(function, rank, "host"))


def finished(**outcomes):
    """The end of Spark's job with outcomes of the ranks r0, r1."""
    rows = [{"rank": int(name[1:]), "part": 0, "data": data} for name, data in outcomes.items()]
    schema = pyarrow.schema([("rank", pyarrow.int64()), ("part", pyarrow.int64()), ("data", pyarrow.binary())])
    return job._Finished(table=pyarrow.Table.from_pylist(rows, schema))


CALLERS = [TaskIdentity(rank, f"host-{rank}", f"name of {rank}") for rank in (0, 1)]
CAUSE = outcome(0, KeyError("enough"))
CONSEQUENCE = outcome(0, PeerLostError("rank 1 is gone"))


class TestEnd:
    def test_nobody_came_and_nothing_is_there(self):
        assert result_of(finished()) == []

    def test_workers_that_all_ended_for_nothing_are_no_table_without_rows(self):
        with pytest.raises(
            ExecutorError, match="all workers ended because their tasks lost the connection to this process"
        ):
            result_of(*map(job._Connected, CALLERS), finished())

    @pytest.mark.parametrize("end", [finished(), finished(r0=outcome(0)), finished(r0=CONSEQUENCE)])
    def test_a_lost_task_is_the_failure(self, end):
        with pytest.raises(WorkerError, match="the task of rank 1 on name of 1 was lost"):
            result_of(job._Connected(CALLERS[1]), job._Lost(CALLERS[1]), end)

    @pytest.mark.parametrize("end", [finished(r0=outcome(0), r1=outcome(1)), finished(r0=CAUSE)])
    def test_a_line_that_is_lost_is_nothing_where_there_is_an_outcome(self, end):
        found = result_of(job._Connected(CALLERS[1]), job._Lost(CALLERS[1]), end)
        assert found == end.table.column("data").to_pylist()

    @pytest.mark.parametrize("end", [job._Lost(CALLERS[1]), job._Finished(error=RuntimeError("Spark's"))])
    def test_what_follows_a_failure_does_not_hide_it(self, end):
        assert result_of(job._Failed(CAUSE), end) == [CAUSE]

    def test_a_consequence_hides_nothing(self):
        with pytest.raises(WorkerError, match="the task of rank 1"):
            result_of(job._Failed(CONSEQUENCE), job._Lost(CALLERS[1]))
        with pytest.raises(ExecutorError, match="Spark could not run the workers: no memory"):
            result_of(job._Failed(CONSEQUENCE), job._Finished(error=RuntimeError("no memory")))


class TestFailure:
    def test_one_that_spark_does_not_tell_of_ends_the_wait(self, monkeypatch):
        monkeypatch.setattr(job, "FAILURE_SECONDS", 0.01)
        events = queue.SimpleQueue()
        events.put(job._Failed(b"the first"))
        events.put(job._Failed(b"the second"))
        wait = job._Wait(lambda: True, 2, SparkOptions(start_timeout=60.0, grace=0.0), events)
        assert wait.result() == [b"the first", b"the second"]


class TestStartTimeout:
    def test_a_stage_that_waits_is_given_up(self):
        options = SparkOptions(start_timeout=0.01)
        with pytest.raises(StartTimeoutError, match=r"0 of 2 workers started within 0\.01 s"):
            job._Wait(lambda: False, 2, options, queue.SimpleQueue()).result()

    def test_who_waits_long_is_told(self, monkeypatch, caplog):
        monkeypatch.setattr(job, "NOTICE_SECONDS", 0.01)
        with pytest.raises(StartTimeoutError):
            job._Wait(lambda: False, 2, SparkOptions(start_timeout=0.1), queue.SimpleQueue()).result()
        assert [record.message.partition(";")[0] for record in caplog.records] == ["0 of 2 workers started so far"]

    def test_one_that_runs_gets_as_long_again_for_what_comes_next(self):
        looks = iter([True, True, False])
        with pytest.raises(StartTimeoutError):
            job._Wait(lambda: next(looks), 2, SparkOptions(start_timeout=0.01), queue.SimpleQueue()).result()
        assert next(looks, None) is None
