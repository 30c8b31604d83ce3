"""Tensors over MPI between two hosts: hvdrun --mpi and run(use_mpi=True) in network namespaces, with a real mpirun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import environment, mpirun
from tests.namespaces import ENTER_HOST, HOSTS
from tests.networks import network as network  # a fixture

SECONDS = 100
NUMBERS = 1 << 20
SCRIPT = f"""
import numpy, os
from collectives.api import Operation
from hvd_cluster.core import basics, features
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.submission import run
from hvd_cluster.core.process_sets import global_process_set

def train():
    basics.init()
    numbers = numpy.full({NUMBERS}, basics.rank() + 1.0, numpy.float32)
    run(Operation.ALLREDUCE, in_place, numbers, "numbers", global_process_set)
    assert features.mpi_enabled()
    return basics.rank(), basics.local_rank(), basics.cross_rank(), set(numbers.tolist())
"""
AS_SCRIPT = 'os.write(1, f"{train()}\\n".encode())'
AS_FUNCTION = """
import sys
from hvd_cluster import run as run_function
for result in run_function(train, num_proc=4, use_mpi=True, hosts=sys.argv[1], mpi_args=sys.argv[2]):
    print(result)
"""
RESULTS = [str((rank, rank % 2, rank // 2, {10.0})) for rank in range(4)]


@pytest.fixture
def on_first_host(network, tmp_path):
    """Runs Python on the first host, in whose PATH an MPI is; gives its output, and the bytes that went out there."""

    def run(*words, mpi="openmpi", operations="mpi"):
        path = f"{Path(mpirun(mpi)).parent}:{os.environ['PATH']}"
        variables = {**environment(mpi, tmp_path), "PATH": path, "HOROVOD_CPU_OPERATIONS": operations}
        before = network.sent()
        with network.inside(HOSTS[0]):
            done = subprocess.run(
                [sys.executable, *words],
                env=variables,
                capture_output=True,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines(), network.sent() - before

    return run


def hosts_of(network):
    return f"localhost:2,{network.names[HOSTS[1]]}:2"


def test_hvdrun_with_the_words_of_the_user(on_first_host, network):
    """One of them is a parameter of Open MPI that hvdrun gives, too."""
    options = ["-np", "4", "-H", hosts_of(network), f"--mpi-args=--mca plm_rsh_agent {ENTER_HOST} --mca btl tcp,self"]
    said, sent = on_first_host("-m", "hvd_cluster", "--mpi", *options, sys.executable, "-c", SCRIPT + AS_SCRIPT)
    assert sorted(said) == [f"[1,{rank}]<stdout>: {result}" for rank, result in enumerate(RESULTS)]
    assert sent > 4 * NUMBERS, "the numbers did not go over the link"


def test_a_function(on_first_host, network):
    agent = f"--mca plm_rsh_agent {ENTER_HOST}"
    said, sent = on_first_host("-c", SCRIPT + AS_FUNCTION, hosts_of(network), agent)
    assert said == RESULTS
    assert sent > 4 * NUMBERS, "the numbers did not go over the link"


def test_ranks_of_mpich_reach_its_mpirun_and_one_another(on_first_host, network):
    """Its own name for the first host would be localhost. Its data would take the memory that both hosts share."""
    agent = f"-launcher ssh -launcher-exec {ENTER_HOST}"
    script = SCRIPT.replace("    assert features.mpi_enabled()\n", "")
    said, _ = on_first_host("-c", script + AS_FUNCTION, hosts_of(network), agent, mpi="mpich", operations="tcp")
    assert said == RESULTS
