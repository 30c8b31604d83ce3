"""Rows on their way into workers, with a feeder that is as simple as can be."""

import os
import time
from contextlib import contextmanager

import pytest

from executors.agents.spark.session import Session
from executors.api import ExecutorError, RemoteError
from executors.job.call import Call
from hvd_cluster.spark.launch import SparkLaunch
from hvd_cluster.spark.rows.partitions import divided

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]

VARIABLE = "PIPE_OF_THE_TEST"
HANG_S = 600


class PipeFeed:
    """Writes the ids of the rows to a pipe, and an end mark, a line each."""

    def __init__(self, folder, reader, writer):
        self.descriptors = [reader]
        self.environment = {VARIABLE: str(reader), "FOLDER_OF_THE_TEST": folder}
        self._writer = writer

    def feed(self, batches, stopped):
        for batch in batches:
            ids = batch.column(0).to_pylist()
            if -1 in ids:
                raise ValueError("there is a row of -1")
            os.write(self._writer, "".join(f"{number}\n" for number in ids).encode())
            if stopped():
                return
        os.write(self._writer, b"end\n")


class PipeFeeder:
    @contextmanager
    def open(self, task):
        reader, writer = os.pipe()
        try:
            yield PipeFeed(task.folder, reader, writer)
        finally:
            os.close(reader)
            os.close(writer)


def ids():
    with os.fdopen(int(os.environ[VARIABLE])) as pipe:
        lines = iter(pipe.readline, "end\n")
        return [int(line) for line in lines]


def run(function, frame, num_proc=2):
    return SparkLaunch.of(num_proc=num_proc).run(Call.of(function), frame, PipeFeeder())


def test_rows_come_to_the_worker_beside_their_partition(spark):
    assert run(ids, spark.range(0, 100, 1, 2)) == [list(range(50)), list(range(50, 100))]


@pytest.mark.parametrize(
    "frame",
    [
        lambda spark: spark.range(0, 100, 1, 3),
        lambda spark: spark.range(0, 100, 1, 4).coalesce(2),
        lambda spark: spark.range(0, 50, 1, 1).union(spark.range(50, 100, 1, 1)),
        lambda spark: spark.range(0, 100, 1, 1).groupBy("id").count().select("id"),
    ],
    ids=["other number", "coalesce", "union", "shuffle"],
)
def test_rows_of_other_partitions_are_dealt_out(spark, frame):
    values = run(ids, frame(spark))
    assert sorted(values[0] + values[1]) == list(range(100))
    assert all(values)


def test_partitions_that_fit_stay_as_they_are(spark):
    session = Session(spark)
    frame = spark.range(0, 100, 1, 2).selectExpr("id * 2 as id").filter("id > 3")
    assert divided(session, frame, 2) is frame
    assert divided(session, frame, 3) is not frame


def test_an_empty_partition(spark):
    assert run(ids, spark.range(0, 1, 1, 2)) == [[], [0]]


@pytest.mark.parametrize(
    "frame",
    [
        lambda spark: spark.range(0, 100, 1, 2).filter("false"),
        lambda spark: spark.range(0, 100, 1, 3).limit(0),
        lambda spark: spark.range(0, 9).join(spark.range(9, 10).filter("id > rand() + 20"), "id"),
    ],
    ids=["filter", "limit", "join"],
)
def test_no_rows_at_all(spark, frame):
    assert run(ids, frame(spark)) == [[], []]


def test_what_is_wrong_with_rows_is_the_failure_of_their_rank(spark):
    def wait():
        try:
            ids()
        finally:
            time.sleep(HANG_S)

    with pytest.raises(ValueError, match="there is a row of -1") as caught:
        run(wait, spark.range(-51, 49, 1, 2))
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.rank == 1


def test_rows_that_break_off_have_their_cause_in_spark(spark, tmp_path):
    def appear():
        (tmp_path / os.environ["HOROVOD_RANK"]).touch()
        time.sleep(600)

    def break_off(batches):
        for batch in batches:
            yield batch  # more than Spark's buffer, which it fills before it sends
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.01)
            raise RuntimeError("no more of this")

    frame = spark.range(0, 40_000, 1, 2).mapInArrow(break_off, "id long")
    with pytest.raises(ExecutorError, match=r"Spark could not run the workers: (?s:.*)RuntimeError: no more of this"):
        run(appear, frame)


def test_a_worker_need_not_read(spark):
    assert run(lambda: os.environ["FOLDER_OF_THE_TEST"] != "", spark.range(0, 100, 1, 2)) == [True, True]


class BadFeeder(PipeFeeder):
    """On rank 1, what it opens cannot be opened, or not be closed."""

    def __init__(self, fails):
        self.fails = fails

    @contextmanager
    def open(self, task):
        if (task.rank, self.fails) == (1, "open"):
            raise OwnError(f"{task.folder} is full")
        with super().open(task) as feed:
            yield feed
        if (task.rank, self.fails) == (1, "close"):
            raise OwnError(f"{task.folder} is gone")


class OwnError(Exception):
    pass


@pytest.mark.parametrize(("fails", "text"), [("open", "is full"), ("close", "is gone")])
def test_what_is_wrong_beside_the_rows_is_the_failure_of_its_rank(spark, fails, text):
    function = (lambda: time.sleep(HANG_S)) if fails == "open" else ids
    with pytest.raises(OwnError, match=text) as caught:
        SparkLaunch.of(num_proc=2).run(Call.of(function), spark.range(0, 100, 1, 2), BadFeeder(fails))
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.rank == 1
    assert "in open" in caught.value.__cause__.traceback
