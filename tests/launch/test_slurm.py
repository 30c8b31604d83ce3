"""The batch scripts of docs/launch run on SLURM, in a cluster of two nodes on this machine."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import slurm
from tests.launch.launch_files import FILES, ROOT

SCRIPT = """
import hvd_cluster.torch as hvd
hvd.init()
print(f"rank {hvd.rank()} of {hvd.size()}", flush=True)
hvd.shutdown()
"""
# Jobs of the tests may take five minutes.
SMALL = ("--cpus-per-task=1", "--time=5")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
SIZES = {"one_node": "--ntasks=2", "several_nodes": "--ntasks-per-node=1", "elastic": "--ntasks-per-node=1"}
SECONDS = 100


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The output of the jobs. They run side by side, on nodes with room for all."""
    pytest.importorskip("torch")
    if slurm.missing():
        pytest.skip(slurm.missing())
    folders = {name: tmp_path_factory.mktemp(name) for name in SIZES}
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), cpus=4) as cluster:
        jobs = {name: submit(cluster, folder, name) for name, folder in folders.items()}
        return {name: output_of(cluster, folders[name], job) for name, job in jobs.items()}


def submit(cluster: dict[str, str], folder: Path, name: str) -> str:
    """The id of the batch job ``name``, which a user submits in ``folder``, the home with the environment."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "venv").symlink_to(Path(sys.executable).parents[1])
    environment = {**cluster, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    script = FILES / "slurm" / f"{name}.sbatch"
    command = ["sbatch", "--parsable", "--output=out", *SMALL, SIZES[name], str(script)]
    return said(command, environment, folder).strip()


def output_of(cluster: dict[str, str], folder: Path, job: str) -> str:
    """The output of a job, and its end. ``sbatch --wait`` would ask only every 10 s."""
    deadline = time.monotonic() + SECONDS
    while (facts := facts_of(cluster, job))["JobState"] not in ENDED:
        assert time.monotonic() < deadline, facts
        time.sleep(0.2)
    return f"{(folder / 'out').read_text()}exit code {facts['ExitCode']}"


def facts_of(cluster: dict[str, str], job: str) -> dict[str, str]:
    said_of_job = said(["scontrol", "--oneliner", "show", "job", job], cluster).split()
    return dict(fact.split("=", 1) for fact in said_of_job if "=" in fact)


def said(command: list[str], environment: dict[str, str], folder: Path | None = None) -> str:
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_find_one_another(outputs: dict[str, str], name: str) -> None:
    told = outputs[name]
    assert [rank for rank in (0, 1) if f"rank {rank} of 2" in told] == [0, 1], told
    assert told.endswith("exit code 0:0"), told
