"""``python train.py`` under launchers that are not ours: the ranks find one another in init()."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cluster import run
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
from tests import slurm
from tests.mpi import ALLREDUCE, mpirun

ROOT = Path(__file__).parents[1]
SECONDS = 100
SCRIPT = r"""
import numpy, os
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import allgather_object
basics.init()
places = [getattr(basics, kind + name)() for kind in ("", "local_", "cross_") for name in ("rank", "size")]
together = allgather_object(places)
basics.shutdown()
basics.init()  # the same ranks again
assert allgather_object(places) == together
text = " ".join(map(str, together[0] + together[-1]))
os.write(1, f"{text}\n".encode())  # in one piece
"""
ONE_HOST = "0 {0} 0 {0} 0 1 {1} {0} {1} {0} 0 1"


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return str(tmp_path / "train.py")


@pytest.fixture
def environment(tmp_path):
    """Root may start processes by Open MPI; each test has a home directory of its own."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **allowed, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}


def lines(command, environment):
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line]


def test_torchrun(script, environment):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    assert lines(command, environment) == [ONE_HOST.format(2, 1)] * 2


def test_processes_with_the_variables_of_torch_distributed(script, environment):
    """As in a Job of Kubernetes: nothing but rank, size and the address of rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as master:  # torch.distributed may use this port
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master.getsockname()[1])}
        outputs = side_by_side(script, [{**environment, **variables, "RANK": str(rank)} for rank in range(2)])
    assert outputs == [ONE_HOST.format(2, 1)] * 2


def side_by_side(script, environments):
    """The outputs of processes that nothing but their variables makes a job."""
    ranks = [subprocess.Popen([sys.executable, script], env=each, stdout=subprocess.PIPE) for each in environments]
    return [rank.communicate(timeout=SECONDS)[0].decode().strip() for rank in ranks]


def test_containers_of_yarn(script, environment, tmp_path):
    job = {"WORLD_SIZE": "2", "HOROVOD_RENDEZVOUS_FOLDER": str(tmp_path)}
    numbers = [
        {"YARN_SHELL_ID": str(each), "CONTAINER_ID": f"container_1_0001_01_00000{each + 1}", "NM_HOST": f"n{each}"}
        for each in (1, 2)
    ]
    outputs = side_by_side(script, [{**environment, **job, **each} for each in numbers])
    assert outputs == ["0 2 0 1 0 2 1 2 0 1 1 2"] * 2
    assert not list(tmp_path.glob("hvd-cluster-*.json")), "the file goes with the rendezvous"


@pytest.mark.parametrize(("mpi", "flags"), [("openmpi", ["--oversubscribe"]), ("mpich", [])])
def test_mpirun(script, environment, mpi, flags):
    command = [mpirun(mpi), *flags, "-n", "3", sys.executable, script]
    assert lines(command, environment) == [ONE_HOST.format(3, 2)] * 3


def test_the_ranks_of_open_mpi_on_several_hosts_meet_by_pmix(script, environment):
    """Open MPI's variables here say that half of the ranks are on another host."""
    change = "import os, runpy, sys; os.environ['OMPI_COMM_WORLD_LOCAL_SIZE'] = '1'; runpy.run_path(sys.argv[1])"
    command = [mpirun("openmpi"), "--oversubscribe", "-n", "2", sys.executable, "-c", change, script]
    assert lines(command, environment) == [ONE_HOST.format(2, 1)] * 2


def test_a_rank_that_fails_before_init_ends_the_job(environment):
    command = [mpirun("openmpi"), "--oversubscribe", "-n", "2", sys.executable, "-c", "raise SystemExit(3)"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize(("mpi", "prefix"), [("openmpi", "[1,{}]<stdout>: "), ("mpich", "[{}] ")])
def test_hvdrun_starts_ranks_by_mpirun(environment, mpi, prefix):
    path = f"{Path(mpirun(mpi)).parent}:{environment['PATH']}"
    command = [sys.executable, "-m", "hvd_cluster", "--mpi", "-np", "2", sys.executable, "-c", ALLREDUCE]
    said = sorted(lines(command, {**environment, "PATH": path}))
    assert said == [f"{prefix.format(rank)}{rank} of 2: 3.0" for rank in range(2)]


@pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
def test_run_starts_ranks_by_mpirun(environment, monkeypatch, mpi, capfd):
    monkeypatch.setenv("PATH", f"{Path(mpirun(mpi)).parent}:{environment['PATH']}")
    monkeypatch.setenv("HOME", environment["HOME"])

    def together(factor):
        basics.init()
        if factor and basics.rank() == 1:
            raise KeyError("no such column")
        return basics.rank(), allgather_object(basics.rank())

    assert run(together, (0,), num_proc=2, use_mpi=True, use_gloo=False) == [(0, [0, 1]), (1, [0, 1])]
    with pytest.raises(KeyError, match="no such column") as caught:
        run(together, (1,), num_proc=2, use_mpi=True)
    assert caught.value.__cause__.rank == 1


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory):
    if slurm.missing():
        pytest.skip(slurm.missing())
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment["SLURM_CONF"]


@pytest.mark.leaves("processes")
@pytest.mark.parametrize("flags", [[], ["--mpi=pmi2"]], ids=["plain", "pmi2"])
def test_srun_on_two_nodes(script, environment, slurm_cluster, flags):
    command = [shutil.which("srun"), *flags, "-N", "2", "-n", "4", sys.executable, script]
    assert lines(command, {**environment, "SLURM_CONF": slurm_cluster}) == ["0 4 0 2 0 2 3 4 1 2 1 2"] * 4


TORCH_DISTRIBUTED = """
import torch
from torch import distributed
import hvd_cluster.torch.distributed

distributed.init_process_group("hvd", init_method="hvd://")
total = torch.ones(1)
distributed.all_reduce(total)
print(distributed.get_world_size(), total.item())
distributed.destroy_process_group()
"""


@pytest.mark.leaves("processes")
def test_torch_distributed_under_srun(tmp_path, environment, slurm_cluster):
    pytest.importorskip("torch")
    (tmp_path / "train.py").write_text(TORCH_DISTRIBUTED)
    command = [shutil.which("srun"), "-N", "2", "-n", "2", sys.executable, tmp_path / "train.py"]
    assert lines(command, {**environment, "SLURM_CONF": slurm_cluster}) == ["2 2.0"] * 2


@pytest.mark.leaves("processes")
def test_hvdrun_in_a_job_of_slurm_uses_its_nodes(script, environment, slurm_cluster):
    with open(script, "a") as file:
        file.write("assert os.environ['SLURM_CPUS_ON_NODE'] == '2'")  # of the agent, which has all cores of its node
    hvdrun = [sys.executable, "-m", "hvd_cluster", "-np", "4", sys.executable, script]
    command = [shutil.which("salloc"), "-N", "2", "-n", "4", *hvdrun]
    expected = [f"[{rank}]<stdout>:0 4 0 2 0 2 3 4 1 2 1 2" for rank in range(4)]
    variables = {"SLURM_CONF": slurm_cluster, "SRUN_CPUS_PER_TASK": "1"}
    assert sorted(lines(command, {**environment, **variables})) == expected
