"""The batch scripts of docs/launch run on SLURM, in a cluster of two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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
# The nodes of the tests have two cores, and their jobs may take five minutes.
SMALL = ("--cpus-per-task=1", "--time=5")
SIZES = {"one_node": "--ntasks=2", "several_nodes": "--ntasks-per-node=1", "elastic": "--ntasks-per-node=1"}
SECONDS = 100


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the jobs write. They run side by side, because sbatch asks only every 10 s whether one has ended."""
    pytest.importorskip("torch")
    if slurm.missing():
        pytest.skip(slurm.missing())
    folders = {name: tmp_path_factory.mktemp(name) for name in SIZES}
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as cluster, ThreadPoolExecutor(len(SIZES)) as pool:
        # Bound: SECONDS for each; submit() ends sbatch then.
        jobs = {name: pool.submit(submit, cluster, folder, name) for name, folder in folders.items()}
        return {name: job.result() for name, job in jobs.items()}


def submit(cluster: dict[str, str], folder: Path, name: str) -> str:
    """The output of the batch job ``name``, which a user submits in ``folder``, the home with the environment."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "venv").symlink_to(Path(sys.executable).parents[1])
    environment = {**os.environ, **cluster, "HOME": str(folder), "PYTHONPATH": str(ROOT)}
    script = FILES / "slurm" / f"{name}.sbatch"
    command = ["sbatch", "--wait", "--output=out", *SMALL, SIZES[name], str(script)]
    run = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    output = (folder / "out").read_text() if (folder / "out").exists() else ""
    return f"{output}{run.stderr}exit code {run.returncode}"


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_find_one_another(outputs: dict[str, str], name: str) -> None:
    told = outputs[name]
    assert [rank for rank in (0, 1) if f"rank {rank} of 2" in told] == [0, 1], told
    assert told.endswith("exit code 0"), told
