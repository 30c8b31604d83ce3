"""Two nodes with addresses of their own, each in a network namespace, as on two machines."""

import ast
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from autoscaler import processes_of

from tests import startup
from tests.namespaces import HOSTS
from tests.networks import network_or_skip

# Ray sets variables when it is imported.
pytestmark = [pytest.mark.leaves("descriptors", "environment", "processes"), pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
PROGRAM = Path(sys.executable).with_name("ray")
PORT = 6379
SECONDS = 120
SCRIPT = """
import os
import sys

import ray

from hvd_cluster.ray import RayExecutor


def train():
    import torch

    import hvd_cluster.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([10.0 ** hvd.rank()]), op=hvd.Sum).item()
    server = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
    return hvd.cross_rank(), hvd.cross_size(), total, ray.util.get_node_ip_address(), server


ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
with RayExecutor(RayExecutor.create_settings(timeout_s=100), num_hosts=2) as executor:
    print(executor.run(train))
"""


@contextmanager
def two_nodes(network, folder):
    """A head on the first host and a node on the second one; ends all of their processes."""
    command = [str(PROGRAM), "start", "--num-cpus=1", f"--object-store-memory={80 << 20}", "--disable-usage-stats"]
    roles = [
        ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"],
        [f"--address={network.address}:{PORT}"],
    ]
    try:
        for host, address, role in zip(HOSTS, ("10.77.0.1", "10.77.0.2"), roles, strict=True):
            run_on(network, host, [*command, f"--node-ip-address={address}", *role])
        yield
    finally:
        end(processes_of(folder))


def end(processes):
    """Kill them and their children, and wait until they are gone."""
    family = set(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family.update(process.children(recursive=True))
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(family, timeout=SECONDS)
    assert not alive


def run_on(network, host, command):
    with network.inside(host):
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": startup.PATH, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_ranks_on_two_nodes_find_each_other(tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with (
        tempfile.TemporaryDirectory(prefix="hvd-") as folder,
        network_or_skip() as network,
        two_nodes(network, folder),
    ):
        out = run_on(network, HOSTS[0], [sys.executable, str(script), f"{network.address}:{PORT}"])
    values = ast.literal_eval(out)
    assert [value[:3] for value in values] == [(0, 2, 11.0), (1, 2, 11.0)]
    assert {value[3] for value in values} == {"10.77.0.1", "10.77.0.2"}
    assert {value[4] for value in values} == {"10.77.0.1"}
