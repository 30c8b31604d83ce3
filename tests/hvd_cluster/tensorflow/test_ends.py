"""The end of a rank, and of a script, while operations of graphs are in flight."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import tensorflow as tf

import hvd_cluster.tensorflow as hvd
from collectives.api import PeerLostError, ShutDownError
from collectives.events import Submitted
from executors.job.job import Job
from executors.job.worlds import assign_ranks
from hvd_cluster.core import basics
from hvd_cluster.tensorflow.errors import engine_error
from tests.collectives.engine.job import until
from tests.hvd_cluster.tensorflow.gates import SECONDS, Gate

SCRIPT = """
import sys, threading
import tensorflow as tf
import hvd_cluster.tensorflow as hvd

hvd.init()
running = threading.Event()


@tf.function
def step(x):
    return [hvd.allreduce(x * factor) for factor in range(20)]


@tf.function
def alone(x):
    return hvd.allreduce(x, name="alone")


def repeat():
    while True:
        try:
            step(tf.ones([1000]))
        except tf.errors.OpError:
            return
        running.set()


def wait():
    step(tf.ones([1000]))
    running.set()
    if hvd.rank():
        alone(tf.ones([10]))


threading.Thread(target={"loops": repeat, "waits": wait}[sys.argv[1]], daemon=True).start()
running.wait()
"""


@pytest.mark.parametrize("kind", ["loops", "waits"])
def test_a_script_ends_while_a_daemon_thread_is_in_a_graph(kind):
    with Job(2) as job:
        ranks = []
        for slot in assign_ranks(["here"] * 2):
            variables = {**os.environ, **job.environment(slot), "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", SCRIPT, kind]
            ranks.append(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
        for rank in ranks:
            _, errors = rank.communicate(timeout=100)
            assert rank.returncode == 0, errors


def interrupt():
    """Python hears of Ctrl-C when the run of the graph ends; the operation counts on all ranks."""

    @tf.function
    def step(x):
        return hvd.allreduce(x, op=hvd.Sum, name="interrupted")

    def press(event):
        if type(event) is Submitted and "interrupted" in event.name:
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hvd.rank():
        end = basics.engine().events.subscribe(press)
        with pytest.raises(KeyboardInterrupt):
            step(tf.constant(1.0))
        end()
    else:
        assert float(step(tf.constant(1.0))) == hvd.size()
    for _ in range(3):
        assert float(tf.function(hvd.allreduce)(tf.constant(1.0), op=hvd.Sum)) == hvd.size()


def test_an_interrupt_in_a_graph_is_raised_after_it(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    pool.run(interrupt)


def lose(victim):
    @tf.function
    def step():
        return [hvd.allreduce(tf.ones([10]), name=f"lost.{index}") for index in range(5)]

    if hvd.rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(tf.errors.UnknownError) as caught:
        step()
    assert isinstance(engine_error(caught.value), PeerLostError)
    assert "HorovodAllreduce" in str(caught.value) or "lost." in str(caught.value)
    hvd.shutdown()


def test_a_lost_rank_is_an_unknown_error(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    outcomes = pool.outcomes(lose, 1)
    outcomes[0].unwrap()
    assert outcomes[1] is None


def leave():
    @tf.function
    def step():
        return hvd.allreduce(tf.ones([10]), name="left")

    if hvd.rank():
        hvd.shutdown()
        return
    with pytest.raises(tf.errors.UnknownError) as caught:
        step()
    assert isinstance(engine_error(caught.value), ShutDownError)


def test_a_rank_that_leaves_is_an_unknown_error(fresh_pool):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    pool.run(leave)


def give_up_a_join(file):
    """Another operation of its run fails on rank 0: the run ends before rank 1 joins, the join when it does."""
    told = Path(file)
    if hvd.rank():
        until(told.exists, SECONDS)
        assert float(hvd.allreduce(tf.constant(5.0), op=hvd.Sum)) == 5.0, "rank 0 has joined"
        assert int(hvd.join()) == 1
    else:
        with Gate() as gate:
            step = tf.function(lambda x: (hvd.join(), hvd.allreduce(gate.late(x), name="late")))
            with pytest.raises(tf.errors.InvalidArgumentError, match="has joined"):
                step(tf.constant(1.0))
        (waiting,) = (thread for thread in threading.enumerate() if thread.name == "hvd-graph-join")
        told.touch()
        waiting.join(SECONDS)
        assert not waiting.is_alive()
    assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="afterwards")) == hvd.size()


def test_a_join_ends_with_the_run_of_its_graph(fresh_pool, tmp_path):
    pool = fresh_pool(2)
    pool.run(hvd.init)
    pool.run(give_up_a_join, str(tmp_path / "told"))
