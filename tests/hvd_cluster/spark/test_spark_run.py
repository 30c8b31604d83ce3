"""run() in two executors of Spark, one application for all."""

import importlib
import io
import os
import signal
import sys
import threading
import time

import pytest
from pyspark.util import inheritable_thread_target
from spark_cluster import eventually

from executors.agents.spark.session import Session
from executors.api import PlacementError, RemoteError, StartTimeoutError, WorkerError
from hvd_cluster.spark import run
from hvd_cluster.spark.task import get_available_devices

# Spark keeps its own processes and connections.
pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.timeout(240),
]

HANG_S = 600


def rank():
    return int(os.environ["HOROVOD_RANK"])


def on_rank_1(action):
    def function():
        if rank() == 1:
            return action()
        time.sleep(HANG_S)

    return function


class OwnError(Exception):
    def __init__(self, code, text):
        super().__init__(f"{text} ({code})")
        self.code = code


def test_results_are_in_the_order_of_the_ranks(spark):
    def function(text, suffix):
        return f"{text}{rank()}/{os.environ['HOROVOD_SIZE']}{suffix}"

    assert run(function, ("rank ",), {"suffix": "."}, num_proc=2) == ["rank 0/2.", "rank 1/2."]


def test_results_may_be_larger_than_spark_allows(spark):
    found = run(lambda: bytes([rank()]) * (30 << 20), num_proc=2)
    assert [(len(value), set(value)) for value in found] == [(30 << 20, {0}), (30 << 20, {1})]


def test_large_results_of_workers_that_cannot_reach_the_driver(spark, monkeypatch):
    monkeypatch.setattr(Session, "addresses", lambda session: ("127.0.0.1", ["127.0.0.3"]))
    before = set(spark.sparkContext._jsc.getPersistentRDDs())
    found = run(lambda: bytes([rank()]) * ((60 << 20) + 1), num_proc=2)
    assert [(len(value), set(value)) for value in found] == [((60 << 20) + 1, {0}), ((60 << 20) + 1, {1})]
    assert set(spark.sparkContext._jsc.getPersistentRDDs()) == before


def test_all_slots_are_used_by_default(spark):
    assert run(rank) == [0, 1]


def test_workers_find_each_other(spark):
    pytest.importorskip("torch")

    def function():
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        places = [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
        return hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum).item(), places

    assert run(function, num_proc=2) == [(3.0, [0, 2, 0, 1]), (3.0, [1, 2, 0, 1])]


def test_large_results(spark):
    size = 100 << 20
    values = run(lambda: bytes([rank()]) * size, num_proc=2)
    assert [(len(value), value[0], value[-1]) for value in values] == [(size, 0, 0), (size, 1, 1)]


def test_output_comes_to_the_driver(spark):
    def function():
        sys.stdout.write("hello\n")
        sys.stderr.write("beware\n")

    stdout, stderr = io.StringIO(), io.StringIO()
    run(function, num_proc=2, stdout=stdout, stderr=stderr)
    assert sorted(stdout.getvalue().splitlines()) == ["[0]<stdout>:hello", "[1]<stdout>:hello"]
    assert sorted(stderr.getvalue().splitlines()) == ["[0]<stderr>:beware", "[1]<stderr>:beware"]


def test_the_environment_is_added_to(spark):
    names = ("FLAVOUR", "SPARK_LOCAL_DIRS")
    found = run(lambda: [os.environ.get(name) for name in names], num_proc=2, env={"FLAVOUR": "new"})
    assert [flavour for flavour, _ in found] == ["new", "new"]
    assert all(folders for _, folders in found)


def test_a_failing_rank_raises_its_own_exception_once(spark, tmp_path):
    def fail():
        with (tmp_path / "attempts").open("a") as file:
            file.write("x")
        raise OwnError(7, "rank 1 has had enough")

    with pytest.raises(OwnError, match="rank 1 has had enough") as caught:
        run(on_rank_1(fail), num_proc=2)
    assert caught.value.code == 7
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.rank == 1
    assert "in fail" in cause.traceback
    assert (tmp_path / "attempts").read_text() == "x"


@pytest.mark.parametrize(
    ("end", "code", "text"),
    [
        (lambda: os._exit(3), 3, "ended with exit code 3 before its function returned"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -9, r"was killed by signal 9 \(SIGKILL"),
        (lambda: sys.exit(4), 4, r"called sys\.exit\(4\) instead of returning a value"),
        (threading.Lock, None, r"returned a value of type _thread\.lock that cannot be pickled"),
    ],
)
def test_a_worker_without_a_result_is_named(spark, end, code, text):
    with pytest.raises(WorkerError, match=f"rank 1 on .*{text}") as caught:
        run(on_rank_1(end), num_proc=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def test_a_lost_peer_is_reported_as_the_peers_own_failure(spark):
    pytest.importorskip("torch")

    def function():
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            os._exit(5)
        hvd.allreduce(torch.ones(1))

    with pytest.raises(WorkerError, match=r"rank 1 on .* ended with exit code 5"):
        run(function, num_proc=2)


def test_too_few_slots(spark):
    with pytest.raises(PlacementError, match=r"3 workers need 3 task slots .* have 2.*set num_proc to at most 2"):
        run(rank, num_proc=3)


def test_executors_that_others_use(spark):
    def occupy(batches):
        time.sleep(HANG_S)
        yield from batches

    def job():
        spark.sparkContext.addJobTag("occupied")
        with pytest.raises(Exception, match="cancelled"):
            spark.range(0, 2, 1, 2).mapInArrow(occupy, "id long").toArrow()

    # pyspark ends its connection with a thread only if told so.
    other = threading.Thread(target=inheritable_thread_target(spark)(job))
    other.start()
    tracker = spark.sparkContext.statusTracker()
    eventually(tracker.getActiveStageIds, HANG_S)
    try:
        with pytest.raises(StartTimeoutError, match=r"0 of 2 workers started within 2 s\. Other jobs may use"):
            run(rank, num_proc=2, start_timeout=2)
    finally:
        spark.sparkContext.cancelJobsWithTag("occupied")
        other.join()


@pytest.mark.usefixtures("horovod_alias")
def test_scripts_for_horovod(spark):
    def function():
        from horovod.spark.task import get_available_devices

        return get_available_devices.__module__

    assert importlib.import_module("horovod.spark").run is run
    assert importlib.import_module("horovod.spark").run(function, num_proc=2) == ["hvd_cluster.spark.task"] * 2


def test_no_devices_outside_of_a_worker(spark):
    assert get_available_devices() == []
    assert run(get_available_devices, num_proc=1) == [[]]
