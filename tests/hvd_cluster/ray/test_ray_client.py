"""A client outside of the cluster: a remote driver drives its jobs, and ends with it."""

import json
import logging
import os
import pickle
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RaySystemError
from ray_cluster import eventually, free_ports, groups_left, workers_left

from executors.agents.ray import client, connection, remote_driver
from executors.agents.ray.client import ClientJob
from executors.agents.ray.connection import have_ended
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.remote_driver import DriverEnd, RemoteDriver, RemoteEntry
from executors.agents.ray.settings import MiniSettings
from executors.api import ExecutorError
from executors.job.loop import Loop

# Ray keeps its connections, and starts worker processes before they are needed.
pytestmark = pytest.mark.leaves("descriptors", "processes")

SECONDS = 100

SCRIPT = """
import json
import logging
import os
import sys
import time
from dataclasses import dataclass

import ray

from hvd_cluster.core import basics
from hvd_cluster.ray import RayExecutor, log


class BatchError(Exception):
    def __init__(self, text, batch):
        super().__init__(text)
        self.batch = batch


@dataclass
class Loss:
    value: int


def rank():
    return int(os.environ["HOROVOD_RANK"])


def train(fails):
    basics.init()
    try:
        print("step of", rank())
        log(Loss(rank()))
        if fails and rank() == 1:
            raise BatchError("bad batch", 7)
        return Loss(basics.size())
    finally:
        basics.shutdown()


def hang():
    basics.init()
    log(["elastic", basics.size()])
    time.sleep(600)


def values(executor):
    logged = []
    returned = executor.run(train, [False], callbacks=[logged.append])
    is_same = all(isinstance(each, Loss) for each in (*returned, *logged))
    return is_same, [each.value for each in returned], sorted(each.value for each in logged)


def failure(executor):
    try:
        executor.run(train, [True])
    except BatchError as error:
        return str(error), error.batch, error.__cause__.rank, "in train" in error.__cause__.traceback


def say(fact):
    print(f"FACT {json.dumps(fact)}", flush=True)


logging.basicConfig(level=logging.INFO)
ray.init(f"ray://127.0.0.1:{sys.argv[1]}")
settings = RayExecutor.create_settings(timeout_s=100)
with RayExecutor(settings, num_workers=2) as executor:
    say(["values", values(executor)])
    say(["failure", failure(executor)])
    references = executor.run_remote(rank)
    say(["single", executor.execute_single(lambda _: rank())])
say(["remote", ray.get(references)])
with RayExecutor(settings, min_workers=1, max_workers=1) as executor:
    executor.run(hang, callbacks=[say])
"""


@pytest.fixture
def port(cluster):
    """That of a server of clients, as Ray starts one for each client, but for the port, which it takes from a list."""
    [port] = free_ports(1)
    options = [f"--address={cluster.address}", "--host=127.0.0.1", f"--port={port}", "--mode=legacy"]
    command = [sys.executable, "-m", "ray.util.client.server", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        yield port
        process.kill()


@pytest.mark.usefixtures("nothing_left")
def test_a_client_that_is_killed_in_the_end(cluster, port, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(port), cluster.head_node.node_id],
        # For so many seconds Ray waits for a client that it has lost. It merges lines that differ in numbers only.
        env={**os.environ, "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "0", "RAY_DEDUP_LOGS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            lines = until("elastic", process.stdout)
            assert workers_left()
        finally:
            process.kill()
    eventually(lambda: not workers_left() and not groups_left(), SECONDS)
    facts = dict(json.loads(line.partition("FACT ")[2]) for line in lines if "FACT " in line)
    assert facts == {
        "values": [True, [2, 2], [0, 1]],
        "failure": ["bad batch", 7, 1, True],
        "single": 0,
        "remote": [0, 1],
        "elastic": 1,
    }
    output = re.sub(r"\x1b\[\d*m", "", "".join(lines))
    assert re.search(r"\(rank 1 pid=\d+\) step of 1", output)
    assert "INFO:collectives.store.server:rendezvous server listens on" in output


def until(name, lines):
    """The lines up to that one, which has to come."""
    found = []
    for line in lines:
        found.append(line)
        if f'FACT ["{name}"' in line:
            return found
    pytest.fail(f"the script ended: {''.join(found)}")


class FakeDeputy:
    """Tells ``news``, one list after the other, and answers other calls with ``reply``. Ray raises exceptions."""

    def __init__(self, news, reply):
        self._news = iter([[DriverEnd.of(lambda: None)], *news])
        self._reply = reply

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda *_: next(self._news) if method == "news" else self._reply)


@pytest.fixture
def killed(monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", killed.append)
    return killed


@pytest.fixture
def start(monkeypatch):
    def get(answer, **_):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def start(*news, reply=None):
        monkeypatch.setattr(client, "_start_remote_driver", lambda: FakeDeputy(news, reply))
        return ClientJob(RayRequest(1), MiniSettings())

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", lambda references, **_: (references, []))
    monkeypatch.setattr(connection, "connection", lambda: "one")
    return start


def test_ctrl_c_ends_the_deputy(start, killed):
    job = start(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        job.call("run", None)
    assert len(killed) == 1
    with pytest.raises(
        ExecutorError, match=r"have ended: KeyboardInterrupt interrupted the wait for its workers; call"
    ):
        job.check()


def test_a_deputy_that_is_lost(start, killed):
    job = start(ActorUnavailableError("no route", b"\0" * 16))
    with pytest.raises(ExecutorError, match="drives the job in the cluster cannot be reached: no route; start the"):
        job.call("run", None)
    assert len(killed) == 1
    with pytest.raises(ExecutorError, match=r"the workers have ended: the actor that drives the job was lost; call"):
        job.check()


def test_a_call_that_does_not_reach_the_deputy(start, killed):
    job = start([], reply=RaySystemError("of Ray\nModuleNotFoundError: No module named 'mine'"))
    with pytest.raises(
        ExecutorError, match=r"in the cluster cannot do so: ModuleNotFoundError: No module named 'mine'"
    ):
        job.call("run", None)
    assert len(killed) == 1


def test_a_callback_that_raises(start, killed):
    def fail(value):
        raise KeyError(value)

    job = start([RemoteEntry(pickle.dumps("loss"))])
    with pytest.raises(KeyError, match="loss"):
        job.call("run", None, callbacks=[fail])
    assert len(killed) == 1


def test_an_exception_of_the_workers_leaves_them_alive(start, killed):
    job = start([end_of(ValueError("bad batch"))], [DriverEnd.of(lambda: [3])])
    with pytest.raises(ValueError, match="bad batch"):
        job.call("run", None)
    job.check()
    assert job.call("run", None) == [3]
    assert not killed


def test_run_remote_after_the_death_of_a_worker(start, killed):
    job = start([end_of(have_ended("rank 1 died"))])
    with pytest.raises(ExecutorError, match="the workers have ended: rank 1 died; call"):
        job.submit(None)
    assert not killed


def test_another_connection(start, killed, monkeypatch):
    job = start()
    monkeypatch.setattr(connection, "connection", lambda: "another")
    with pytest.raises(ExecutorError, match=r"ray\.shutdown\(\) was called meanwhile"):
        job.check()
    job.close()
    assert not killed


class FakeElasticJob:
    """Runs until something in its loop raises."""

    def __init__(self, *_):
        self._loop = Loop()
        self.soon = self._loop.soon

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    def run(self):
        self._loop.run(lambda: False)


def test_an_elastic_job_ends_by_itself_when_the_client_waits_no_longer(monkeypatch):
    """So it withdraws what it has asked of the autoscaler."""
    monkeypatch.setattr(remote_driver, "LOGGERS", ())
    monkeypatch.setattr(remote_driver, "ElasticRayJob", FakeElasticJob)
    driver = RemoteDriver(logging.INFO)
    assert not driver.stop()
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(driver.run_elastic, None, None, None, False)
        eventually(driver.stop, SECONDS)
        done.result(SECONDS)
    [end] = driver.news()
    with pytest.raises(ExecutorError, match="the client does not wait for the job any more"):
        end.unwrap()


class Unreadable:
    def __reduce__(self):
        return __import__, ("of_the_workers_only",)


def test_an_exception_that_cannot_travel():
    with pytest.raises(ExecutorError, match=r"ValueError: .*lock"):
        end_of(ValueError(threading.Lock())).unwrap()


def test_a_value_of_a_module_that_the_client_lacks():
    with pytest.raises(
        ExecutorError, match=r"cannot be unpickled in the client \(ModuleNotFoundError: No module named 'of"
    ):
        DriverEnd.of(lambda: [Unreadable()]).unwrap()


def end_of(error):
    def fail():
        raise error

    return DriverEnd.of(fail)
