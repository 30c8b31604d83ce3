"""The driver's side of a job, where a stand-in is Spark."""

import queue
import threading
from contextlib import contextmanager

import pytest

from executors.api import StartTimeoutError
from executors.spark import job
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
        news = queue.SimpleQueue()
        with job._Stage(spark, spark, None, news):
            while not spark.started:
                spark.entered.wait(0.01)
        assert str(news.get(timeout=0).error) == "cancelled"


class TestFailure:
    def test_one_that_spark_does_not_tell_of_ends_the_wait(self, monkeypatch):
        monkeypatch.setattr(job, "FAILURE_SECONDS", 0.01)
        news = queue.SimpleQueue()
        news.put(job._Failed(b"the first"))
        news.put(job._Failed(b"the second"))
        wait = job._Wait(lambda: True, 2, SparkOptions(start_timeout=60.0, grace=0.0), news)
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
