"""Elastic jobs on several hosts: an agent on each, network namespaces or only in name."""

import os
import re

import psutil
import pytest

from executors.api import ExecutorError
from hvd_cluster import run
from tests.hvd_cluster.elastic.jobs import PATIENCE_SECONDS, assert_agreement
from tests.networks import network as network  # a fixture

pytestmark = pytest.mark.timeout(300)

# A host in name only: its shell is one of this machine, and its agent an agent.
SHELL = "env HVD_TEST_HOST={host}"
HERE = {"HOROVOD_GLOO_IFACE": "lo"}
OPTIONS = ("--max-np", 3, "--blacklist-cooldown-range", 1, 1)


@pytest.fixture
def offer(tmp_path):
    """Says which hosts there are from now on."""

    def say(text):
        (tmp_path / "next").write_text(text)
        (tmp_path / "next").rename(tmp_path / "hosts")

    say("localhost:1\n")
    return say


@pytest.fixture
def on_hosts(start, offer, tmp_path):
    """Starts a job that has one rank on this host, and finds more in the file of :func:`offer`."""

    def begin(*options, shell=SHELL, variables=HERE, **arguments):
        script = ("--host-discovery-script", f"cat {tmp_path / 'hosts'}", "--remote-shell", shell)
        return start(1, *OPTIONS, *script, *options, variables=variables, **arguments)

    return begin


def agents(job):
    return [
        process
        for process in psutil.Process(job.process.pid).children(recursive=True)
        if "executors.agents.hosts.agent" in _command(process)
    ]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def host_of(job, worker):
    return psutil.Process(job.pid(worker)).environ()["HVD_TEST_HOST"]


def test_a_job_grows_to_another_host_and_leaves_it(on_hosts, offer):
    job = on_hosts()
    offer("localhost:1\nb:2\n")
    job.until_training(0, 1, 2)
    assert [host_of(job, worker) for worker in (1, 2)] == ["b", "b"]
    lost = job.rank(1)  # 2 if it was slower than the other newcomer
    job.kill(1)
    job.until_training(0, 2, 3)
    offer("localhost:1\n")
    job.until_training(0)
    assert job.end() == 0, job.log
    assert_agreement(job, 0)
    assert re.fullmatch(r"world \d: 1 rank, rank 1 on host b left, rank 2 on host b left", job.changes[-1])
    # Its agent says how it ended; that is not waited for longer than a second.
    assert re.search(rf"rank {lost} on host b lost \((was killed by signal 9|ended)", job.log)


def test_what_workers_of_another_host_write_is_shown(on_hosts, offer):
    job = on_hosts()
    offer("localhost:1\nb:1\n")
    job.until_training(0, 1)
    job.want("raise", 1)
    assert job.wait() == 1
    assert "[1]<stderr>:ValueError: bad batch\n" in job.log
    assert "hvdrun: rank 1 on b ended with exit code 1; the other ranks were ended. The last lines" in job.log


def test_a_lost_agent_takes_its_workers_along_and_comes_back(on_hosts, offer):
    job = on_hosts()
    offer("localhost:1\nb:1\n")
    job.until_training(0, 1)
    (agent,) = agents(job)
    worker = psutil.Process(job.pid(1))
    agent.kill()
    job.until_training(0, 2)
    worker.wait(PATIENCE_SECONDS)
    assert job.end() == 0, job.log
    assert_agreement(job, 0, 2)
    # The worker is asked to end when its agent dies. It may tell the driver so before the driver sees the agent's end.
    assert re.search(r"world \d: 1 rank, rank 1 on host b (lost \(its agent has ended\)|left)", job.log)


def test_an_agent_that_is_asked_to_end_lets_its_workers_hand_over(on_hosts, offer):
    job = on_hosts("--reset-limit", 1)  # the newcomer is the one resize
    offer("localhost:1\nb:1\n")
    job.until_training(0, 1)
    (agent,) = agents(job)
    offer("localhost:1\n")
    agent.terminate()
    job.until_training(0)
    job.until(lambda: "rank 1 on host b left" in job.log, "the change is told")  # a job that ends tells no more
    assert job.end() == 0, job.log
    assert_agreement(job, 0)
    assert re.fullmatch(r"world \d: 1 rank, rank 1 on host b left", job.changes[-1])


def test_a_killed_driver_leaves_no_agent_and_no_worker(on_hosts, offer):
    job = on_hosts()
    offer("localhost:1\nb:1\n")
    job.until_training(0, 1)
    processes = [*agents(job), *(psutil.Process(job.pid(worker)) for worker in (0, 1))]
    job.process.kill()
    _, alive = psutil.wait_procs(processes, PATIENCE_SECONDS)
    assert not alive


def test_a_host_that_cannot_be_reached_is_left_out(on_hosts, offer):
    job = on_hosts(shell="echo no route to {host} && false")
    offer("localhost:1\nb:1\n")
    problem = "host b cannot be used: its agent ended with exit code"
    job.until(lambda: problem in job.log, "the problem is told")
    job.until_training(0)
    assert job.end() == 0, job.log
    assert job.log.count(problem) == 1
    assert_agreement(job, 0)


def test_a_function_on_two_hosts(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    script = "echo localhost:1; echo b:1"
    results = run(
        lambda: (os.environ["HOROVOD_RANK"], os.environ.get("HVD_TEST_HOST")),
        min_num_proc=2,
        host_discovery_script=script,
        remote_shell=SHELL,
    )
    assert results == [("0", None), ("1", "b")]


def test_an_exception_of_a_function_on_another_host(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")

    def fail():
        raise LookupError(os.environ["HVD_TEST_HOST"])

    with pytest.raises(LookupError, match="b") as caught:
        run(fail, min_num_proc=1, host_discovery_script="echo b:1", remote_shell=SHELL)
    assert "rank 0 on b" in str(caught.value.__cause__)


def test_an_agent_with_another_version_is_refused(monkeypatch, caplog):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    monkeypatch.setattr("executors.agents.hosts.messages.VERSION", "9.9")
    with pytest.raises(ExecutorError, match=r"the job has 0 of .* Host b cannot be used: it has hvd"):
        run(os.getpid, min_num_proc=1, host_discovery_script="echo b:1", remote_shell=SHELL, elastic_timeout=4)
    assert re.search(
        r"host b cannot be used: it has hvd-cluster .*, the driver 9.9 on Python 3.*; install", caplog.text
    )


@pytest.mark.parametrize("remote_shell", ["", "ssh '{host}"])
def test_remote_shells_that_are_refused(remote_shell):
    with pytest.raises(ValueError, match="the remote shell"):
        run(os.getpid, min_num_proc=1, host_discovery_script="echo b:1", remote_shell=remote_shell)


def test_a_remote_shell_without_hosts():
    with pytest.raises(ValueError, match="remote_shell is for other hosts; give one of hosts, hostfile"):
        run(os.getpid, remote_shell="ssh")


def test_a_host_behind_a_cut_link(on_hosts, offer, network):
    """The survivors go on, and the agent ends the workers that the driver cannot reach."""
    other = network.names["host-1"]
    with network.inside("host-0"):
        job = on_hosts(shell="ip netns exec {host}", variables={})
    offer(f"localhost:1\n{other}:1\n")
    job.until_training(0, 1)
    worker = psutil.Process(job.pid(1))
    network.cut()
    job.until_training(0)
    worker.wait(PATIENCE_SECONDS)
    assert job.end() == 0, job.log
    assert_agreement(job, 0)
    assert f"1 rank, rank 1 on host {other} lost (" in job.log


def test_a_large_result_of_another_host(monkeypatch):
    """It is larger than what a connection keeps."""
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    script = "echo b:1"
    (result,) = run(lambda: bytes(32 << 20), min_num_proc=1, host_discovery_script=script, remote_shell=SHELL)
    assert len(result) == 32 << 20
