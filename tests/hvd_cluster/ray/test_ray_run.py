"""Functions on four workers, two on each of two nodes, which all tests here share."""

import os
import re
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest
import ray
from ray.util.queue import Queue

from collectives.api import PeerLostError
from executors.api import ExecutorError, RemoteError, WorkerError
from hvd_cluster.core import basics
from hvd_cluster.ray import BaseHorovodWorker, RayExecutor, log

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = pytest.mark.leaves("descriptors", "processes")

SIZE = 4


class SpecialError(Exception):
    """Of this module, so that it has to come back as what it is."""

    def __init__(self, rank, detail):
        super().__init__(f"rank {rank}: {detail}")
        self.rank = rank
        self.detail = detail

    def __reduce__(self):
        return SpecialError, (self.rank, self.detail)


@pytest.fixture(scope="module")
def executor(cluster):
    with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=SIZE) as executor:
        yield executor


def rank():
    return int(os.environ["HOROVOD_RANK"])


def variables():
    names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"]
    return [int(os.environ[f"HOROVOD_{name}"]) for name in names]


MAIN_SCRIPT = """
import sys
from dataclasses import dataclass

import ray

from hvd_cluster.ray import RayExecutor


class BatchError(Exception):
    pass


@dataclass
class Loss:
    value: float


def train(fails):
    if fails:
        raise BatchError("bad batch")
    return Loss(0.5)


def attempt(run):
    try:
        run()
    except BatchError as error:
        return str(error)


ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=1) as executor:
    [loss] = executor.run(train, [False])
    caught = attempt(lambda: executor.run(train, [True]))
    executed = executor.execute_single(lambda _: Loss(1.0))
print([isinstance(loss, Loss), loss == Loss(0.5), isinstance(executed, Loss), caught])
ray.shutdown()
"""


def test_classes_of_the_main_script_come_back_as_what_they_are(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(MAIN_SCRIPT)
    command = [sys.executable, str(script), cluster.address]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("[True, True, True, 'bad batch']\n", 0), done.stderr


OUTPUT_SCRIPT = """
import os
import sys

import ray

from hvd_cluster.ray import RayExecutor


def speak():
    print("step of", os.environ["HOROVOD_RANK"])
    print("warning of", os.environ["HOROVOD_RANK"], file=sys.stderr)


ray.init(address=sys.argv[1], logging_level="ERROR")
with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_workers=2, cpus_per_worker=0.5) as executor:
    executor.run(speak)
    sys.stdin.read()
ray.shutdown()
"""


def test_the_rank_is_in_front_of_what_a_worker_prints(cluster, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(OUTPUT_SCRIPT)
    missing = {f"(rank {rank} {text} of {rank}" for rank in (0, 1) for text in ("step", "warning")}
    process = subprocess.Popen(
        [sys.executable, str(script), cluster.address],
        # Ray merges lines that differ in their numbers only.
        env={**os.environ, "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            lines = []
            while missing:
                lines.append(process.stdout.readline())
                assert lines[-1], f"the script ended without {missing}: {lines}"
                missing.discard(re.sub(r"\x1b\[\d*m|pid=\d+(, ip=[\d.]+)?\) ", "", lines[-1].rstrip()))
        finally:
            process.stdin.close()


class Counter:
    def __init__(self, start, step=1):
        self.value = start + step


def test_a_worker_of_ones_own(cluster):
    remote = ray.remote(num_cpus=0, runtime_env={"env_vars": {"OF_THE_USER": "1"}})(BaseHorovodWorker).remote(1, 4)
    call = lambda method, *args: ray.get(getattr(remote, method).remote(*args), timeout=100)  # noqa: E731
    call("update_env_vars", {"FLAVOUR": 7})
    variables = call("env_vars")
    node = call("node_id")
    names = ("HOROVOD_HOSTNAME", "HOROVOD_RANK", "HOROVOD_SIZE", "FLAVOUR", "OF_THE_USER")
    assert [variables[name] for name in names] == [node, "1", "4", "7", "1"]
    assert node in {each["NodeID"] for each in ray.nodes()}
    assert call("hostname") == socket.gethostname()
    assert call("get_gpu_ids") == []
    assert call("execute", lambda executable: executable) is None
    call("start_executable", Counter, [3], {"step": 2})
    assert call("execute", lambda executable: executable.value) == 5
    queue = Queue(actor_options={"num_cpus": 0})
    call("set_queue", queue)
    call("execute", lambda _: log({"loss": 0.5}))
    assert queue.get(timeout=100) == {"loss": 0.5}
    queue.shutdown()
    ray.kill(remote)


def test_each_worker_has_threads_for_its_cpus(executor):
    assert executor.run(os.getenv, ["OMP_NUM_THREADS"]) == ["1"] * SIZE


def test_ranks_are_dense_on_every_node(executor):
    assert executor.run(variables) == [
        [0, 4, 0, 2, 0, 2],
        [1, 4, 1, 2, 0, 2],
        [2, 4, 0, 2, 1, 2],
        [3, 4, 1, 2, 1, 2],
    ]


def test_the_host_is_the_node(executor):
    def hosts():
        return os.environ["HOROVOD_HOSTNAME"], ray.get_runtime_context().get_node_id()

    names = executor.run(hosts)
    assert all(host == node for host, node in names)
    assert {host for host, _ in names} == {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def test_rendezvous_on_loopback_where_one_address_has_all_nodes(executor):
    assert executor.run(os.getenv, ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]) == ["127.0.0.1"] * SIZE


def test_every_worker_is_a_process_of_its_own(executor):
    assert len({os.getpid(), *executor.run(os.getpid)}) == SIZE + 1


def test_functions_run_in_the_main_thread(executor):
    assert executor.run(lambda: threading.current_thread() is threading.main_thread()) == [True] * SIZE


def test_values_are_in_the_order_of_ranks(executor):
    assert executor.run(lambda base, scale: base + scale * rank(), [10], {"scale": 2}) == [10, 12, 14, 16]


def test_run_remote_returns_references(executor):
    references = executor.run_remote(lambda factor: factor * rank(), kwargs={"factor": 3})
    assert ray.get(references) == [0, 3, 6, 9]


def test_run_remote_raises_what_ray_raises(executor):
    def fail():
        raise SpecialError(rank(), "remote")

    [first, *_] = executor.run_remote(fail)
    with pytest.raises(SpecialError, match="rank 0: remote"):
        ray.get(first)
    assert executor.run(rank) == [0, 1, 2, 3]


def test_execute_without_executable(executor):
    assert executor.execute(lambda executable: (executable, rank())) == [(None, 0), (None, 1), (None, 2), (None, 3)]


def test_execute_single_is_rank_0(executor):
    assert executor.execute_single(lambda _: rank()) == 0


def test_a_large_closure_travels(executor):
    data = np.arange(1 << 20, dtype=np.float64)
    assert executor.run(lambda: float(data.sum())) == [float(data.sum())] * SIZE


def test_object_references_travel(executor):
    reference = ray.put([1, 2, 3])
    assert executor.run(ray.get, [reference]) == [[1, 2, 3]] * SIZE


def test_an_exception_arrives_as_itself(executor):
    def fail_on_2():
        if rank() == 2:
            raise SpecialError(rank(), "broken")

    with pytest.raises(SpecialError, match="rank 2: broken") as caught:
        executor.run(fail_on_2)
    assert caught.value.detail == "broken"
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.rank == 2
    assert cause.host == executor.run(lambda: os.environ["HOROVOD_HOSTNAME"])[2]
    assert re.match(rf"raised by rank 2 on \S+ \([\d.]+, node {cause.host[:8]}\):\n", str(cause))
    assert "fail_on_2" in cause.traceback


def test_sys_exit_does_not_end_the_worker(executor):
    with pytest.raises(WorkerError, match=r"called sys\.exit\(3\)") as caught:
        executor.run(lambda: sys.exit(3))
    assert caught.value.exit_code == 3
    assert executor.run(rank) == [0, 1, 2, 3]


def test_a_value_that_cannot_be_sent(executor):
    with pytest.raises(WorkerError, match="cannot be pickled"):
        executor.run(threading.Lock)


def test_a_function_that_cannot_be_sent(executor):
    lock = threading.Lock()

    def locked():
        return lock

    with pytest.raises(TypeError, match=r"locked cannot be sent to the workers: the function.*'_thread\.lock'"):
        executor.run(locked)


def test_an_argument_that_cannot_be_sent(executor):
    with pytest.raises(TypeError, match=r"rank cannot be sent to the workers: argument 'key' cannot be pickled"):
        executor.run(rank, kwargs={"key": threading.Lock()})


def test_workers_find_each_other(executor):
    pytest.importorskip("torch")

    def total():
        import torch

        import hvd_cluster.torch as hvd

        hvd.init()
        try:
            return hvd.allreduce(torch.tensor([10.0 ** rank()]), op=hvd.Sum).item(), hvd.local_rank()
        finally:
            hvd.shutdown()

    assert executor.run(total) == [(1111.0, 0), (1111.0, 1), (1111.0, 0), (1111.0, 1)]


def test_ranks_that_wait_in_init_for_one_that_has_returned_hear_of_it(executor):
    def size(missing):
        if rank() == missing:
            return 0
        basics.init()
        try:
            return basics.size()
        finally:
            basics.shutdown()

    for missing in (0, 1):
        with pytest.raises(
            PeerLostError, match=rf"rank {missing} on host \w+ returned and did not come to this hvd\.init\(\)"
        ):
            executor.run(size, (missing,))
    assert executor.run(size, (None,)) == [SIZE] * SIZE


def test_no_function(executor):
    with pytest.raises(TypeError, match="3 is not a function"):
        executor.run(3)


def test_starting_twice(executor):
    with pytest.raises(ExecutorError, match=r"started already; call shutdown\(\)"):
        executor.start()
