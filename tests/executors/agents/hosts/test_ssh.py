"""hvdrun over ssh: two hosts in network namespaces, of which the second one has a real sshd."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import sshd
from tests.mpi import ALLREDUCE, mpirun
from tests.namespaces import HOSTS
from tests.networks import network_or_skip

ROOT = Path(__file__).parents[4]
SECONDS = 60
SUM = """
import numpy, os, sys
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
basics.init()
host = os.readlink("/proc/self/ns/net")
print(basics.rank(), len(set(allgather_object(host))), os.getcwd() == sys.argv[1], flush=True)
"""

pytestmark = [
    pytest.mark.skipif(bool(sshd.missing()), reason=sshd.missing()),
    pytest.mark.leaves("processes"),
]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ssh")
    with network_or_skip() as network, sshd.sshd_on(network, folder) as address:
        yield network, folder, address


@pytest.fixture
def hvdrun(hosts, tmp_path):
    """Starts an hvdrun on the first host, which reaches the second one by ssh."""
    network, folder, address = hosts
    started = []

    def start(*arguments, program=("-m", "hvd_cluster"), key=folder / "user", port=sshd.PORT, **variables):
        words = [str(word).format(there=address) for word in ("-p", port, "-i", key, *arguments)]
        with network.inside(HOSTS[0]):
            process = subprocess.Popen(
                ["env", "--default-signal=INT", sys.executable, *program, *words],
                env={**sshd.environment(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_of_two_hosts_meet(hvdrun, tmp_path):
    (tmp_path / "train.py").write_text(SUM)
    process = hvdrun("-np", 3, "-H", "localhost:1,{there}:2", sys.executable, "train.py", tmp_path)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[{rank}]<stdout>:{rank} 2 True" for rank in range(3)]


def test_mpirun_starts_ranks_on_two_hosts(hvdrun, hosts):
    network, folder, address = hosts
    path = f"{Path(mpirun('openmpi')).parent}:{sshd.environment(folder)['PATH']}"
    with network.inside(HOSTS[0]):
        sshd.trust(folder, address)
    options = ("--mpi", "-np", 3, "-H", f"{network.address}:1,{{there}}:2")
    process = hvdrun(*options, sys.executable, "-c", ALLREDUCE.replace("{", "{{").replace("}", "}}"), PATH=path)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[1,{rank}]<stdout>: {rank} of 3: 6.0" for rank in range(3)]


FUNCTION = """
import os, sys
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
from hvd_cluster import run
def train():
    basics.init()
    return basics.rank(), len(set(allgather_object(os.readlink("/proc/self/ns/net"))))
_, port, _, key, hosts = sys.argv[1:]
print(run(train, hosts=hosts, num_proc=3, use_mpi=True, ssh_port=int(port), ssh_identity_file=key))
"""


def test_mpirun_starts_a_function_on_two_hosts(hvdrun, hosts):
    network, folder, address = hosts
    path = f"{Path(mpirun('mpich')).parent}:{sshd.environment(folder)['PATH']}"
    with network.inside(HOSTS[0]):
        sshd.trust(folder, address)
    process = hvdrun(f"{network.address}:1,{{there}}:2", program=("-c", FUNCTION), PATH=path)
    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (0, "[(0, 2), (1, 2), (2, 2)]\n"), err


def test_an_elastic_job_finds_a_host_of_ssh(hvdrun, tmp_path):
    (tmp_path / "train.py").write_text(SUM)
    script = "echo localhost:1; echo {there}:1"
    options = ("-np", 2, "--min-np", 2, "--host-discovery-script", script)
    process = hvdrun(*options, sys.executable, "train.py", tmp_path)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert len(out.splitlines()) == 2


def test_the_words_of_ssh_are_in_the_error(hvdrun, hosts):
    wrong = hosts[1] / "host"  # a key that may not come in
    process = hvdrun("-np", 2, "-H", "localhost:1,{there}:1", "true", key=wrong)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert re.search(r"hvdrun: host [\d.]+ cannot be used: its agent ended with exit code 255 .*Permission denied", err)


def test_a_port_without_sshd(hvdrun):
    process = hvdrun("-np", 2, "-H", "localhost:1,{there}:1", "true", port=1)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "Connection refused" in err


def started_by(process, name):
    """The two ranks, one of them below sshd, when they run."""
    assert {process.stdout.readline()[3:] for _ in range(2)} == {"<stdout>:started\n"}
    return [each for each in psutil.process_iter(["cmdline"]) if name in " ".join(each.info["cmdline"] or ())]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher_on_any_host(hvdrun, tmp_path, number):
    (tmp_path / "sleep").symlink_to("/bin/sleep")
    script = f"echo started; exec {tmp_path}/sleep 600"
    process = hvdrun("-np", 2, "-H", "localhost:1,{there}:1", "sh", "-c", script)
    ranks = started_by(process, f"{tmp_path}/sleep")
    agents = [
        each
        for each in psutil.process_iter(["cmdline"])
        if "executors.agents.hosts.agent" in (each.info["cmdline"] or ())
    ]
    assert len(ranks) >= 2
    assert agents
    process.send_signal(number)
    process.communicate(timeout=SECONDS)
    _, alive = psutil.wait_procs([*ranks, *agents], SECONDS)
    assert not alive


def test_the_secret_is_on_no_command_line(hvdrun, tmp_path):
    script = f"echo $_HOROVOD_SECRET_KEY > {tmp_path}/secret-$HOROVOD_RANK; echo started; exec sleep 600"
    process = hvdrun("-np", 2, "-H", "localhost:1,{there}:1", "--verbose", "sh", "-c", script)
    assert {process.stdout.readline()[3:] for _ in range(2)} == {"<stdout>:started\n"}
    secrets = {(tmp_path / f"secret-{rank}").read_text().strip() for rank in (0, 1)}
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    process.terminate()
    _, err = process.communicate(timeout=SECONDS)
    (secret,) = secrets
    assert len(secret) == 44
    assert any("ssh" in line and "-o BatchMode" in line for line in lines)
    assert not [line for line in [*lines, err] if secret in line]


def test_a_failure_on_the_other_host_ends_all_within_seconds(hvdrun):
    script = '[ "$HOROVOD_RANK" = 1 ] || exec sleep 600; echo bad luck >&2; exit 3'
    begin = time.monotonic()
    process = hvdrun("-np", 2, "-H", "localhost:1,{there}:1", "sh", "-c", script)
    _, err = process.communicate(timeout=SECONDS)
    assert time.monotonic() - begin < SECONDS
    assert process.returncode == 3
    assert re.search(r"hvdrun: rank 1 on 10[\d.]+ ended with exit code 3; the other ranks were ended", err)
    assert err.endswith("    bad luck\n")
