"""Elastic jobs on two executors: a lost task has a successor, crashed workers come back, a notice is used."""

import os
import signal
import time

import pytest
from spark_cluster import eventually
from spark_training import SECONDS, Training, agent_of, agents, decommissioned, executor_of

from executors.agents.hosts.messages import AgentHello
from executors.api import ExecutorError, WorkerError
from hvd_cluster import spark as hvd_spark

pytestmark = [
    pytest.mark.leaves("descriptors", "processes"),
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.timeout(500),
]


def train(folder, steps, size):
    """Ends after ``steps`` among ``size`` ranks, once it may; returns the number of all steps, rank and size."""
    from pathlib import Path

    from hvd_cluster.core import basics
    from hvd_cluster.elastic.loop import run
    from hvd_cluster.elastic.state import ObjectState
    from hvd_cluster.ops.objects import allgather_object

    basics.init()
    worker = os.environ["HOROVOD_WORKER_ID"]
    Path(folder, worker).write_text(f"{os.getpid()}")
    state = ObjectState(step=0, in_size=0)

    @run
    def loop(state):
        while state.in_size < steps:
            parts = allgather_object((state.step, Path(folder, "go").exists()), "parts")
            assert len({step for step, _ in parts}) == 1
            state.step += 1
            state.in_size += basics.size() == size and all(may_end for _, may_end in parts)
            Path(folder, f"{worker}.step").write_text(f"{state.step} {basics.size()}")
            time.sleep(0.05)
            state.commit()
        return state.step, basics.rank(), basics.size()

    return loop(state)


def training_of(spark, folder, size, **arguments):
    arguments = {"args": (str(folder), 20, size), "start_timeout": SECONDS, **arguments}
    return Training(spark, folder, lambda: hvd_spark.run_elastic(train, **arguments))


def assert_agreement(results, size):
    assert len({step for step, _, _ in results}) == 1
    assert [result[1:] for result in results] == [(rank, size) for rank in range(size)]


def test_a_job_without_changes(spark, tmp_path):
    training = training_of(spark, tmp_path, 2, num_proc=2, min_num_proc=1)
    training.until(2, 0, 1)
    assert_agreement(training.results(), 2)


def test_a_lost_task_and_a_crashed_worker_have_successors(spark, tmp_path):
    training = training_of(spark, tmp_path, 2, num_proc=2, min_num_proc=1)
    training.until(2, 0, 1)
    agent_of(training.process(1)).kill()
    successor = training.successor(2, 0, 1)
    training.process(0).send_signal(signal.SIGKILL)
    training.successor(2, 0, 1, successor)
    assert_agreement(training.results(), 2)


def test_an_exception_of_the_user_ends_the_job(spark):
    def fail():
        raise LookupError("no such batch")

    with pytest.raises(LookupError, match="no such batch") as caught:
        hvd_spark.run_elastic(fail, num_proc=2, min_num_proc=1)
    assert "raised by rank" in str(caught.value.__cause__)


def test_the_reset_limit(spark, tmp_path):
    training = training_of(spark, tmp_path, 2, num_proc=2, min_num_proc=1, reset_limit=0)
    training.until(2, 0, 1)
    training.process(1).kill()
    with pytest.raises(WorkerError, match="exceeded its limit of 0"):
        training.results()


def test_slots_that_do_not_come(spark):
    with pytest.raises(ExecutorError, match="the job has 0 of at least 3 workers"):
        hvd_spark.run_elastic(os.getpid, num_proc=3, elastic_timeout=5)


def of_another_version(monkeypatch, *partitions):
    """The tasks of ``partitions`` are on executors with another version of the library."""
    ends = tuple(f"/task-0.{partition}." for partition in partitions)
    text = "it has hvd-cluster 9.9"
    monkeypatch.setattr(AgentHello, "mismatch", property(lambda hello: text * any(end in hello.host for end in ends)))


def test_an_executor_with_another_version_does_not_end_the_job(spark, tmp_path, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        of_another_version(patch, 1)
        training = training_of(spark, tmp_path, 2, num_proc=1, min_num_proc=1, max_num_proc=2)
        training.until(1, 0)
        eventually(lambda: "cannot be used" in caplog.text, SECONDS)
    [refused] = agents() - {agent_of(training.process(0))}
    refused.kill()  # with its executor, say; another one comes
    training.until(2, 0, 1)
    assert_agreement(training.results(), 2)
    [line] = [line for line in caplog.messages if "cannot be used" in line]
    assert line.endswith(" cannot be used: it has hvd-cluster 9.9; install the same versions")


def test_too_few_executors_with_the_version_of_the_driver(spark, monkeypatch):
    of_another_version(monkeypatch, 0, 1)
    with pytest.raises(ExecutorError, match=r"task-0\..* cannot be used: it has .*; install the same versions"):
        hvd_spark.run_elastic(os.getpid, num_proc=2, min_num_proc=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_proc": 2, "min_num_proc": 3}, "must not descend"),
        ({"min_np": 1, "min_num_proc": 1}, "leave min_np out"),
        ({"num_proc": 0}, "num_proc is 0"),
    ],
)
def test_numbers_that_are_refused(spark, arguments, message):
    with pytest.raises(ValueError, match=message):
        hvd_spark.run_elastic(os.getpid, **arguments)


def test_a_notice_is_used(spark, tmp_path, caplog):
    training = training_of(spark, tmp_path, 1, num_proc=2, min_num_proc=1, reset_limit=0)
    training.until(2, 0, 1)
    with caplog.at_level("INFO", "executors"), decommissioned(spark, executor_of(training.process(1))):
        training.until(1, 0)
        (result,) = training.results()
        eventually(lambda: "left, resumed after" in caplog.text, SECONDS)
    assert result[1:] == (0, 1)
    assert ", 0 steps lost" in caplog.text
