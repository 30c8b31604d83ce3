"""Examples for Ray run, each as a driver with a cluster of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import startup

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]


def run_example(name, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "examples" / name, *arguments],
        env={**os.environ, "PYTHONPATH": startup.PATH, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


@pytest.mark.timeout(240)
def test_a_trial_of_a_search_trains_in_its_placement_group():
    run = run_example("search_ray.py", "--trials", "1", "--epochs", "1")
    assert run.returncode == 0, run.stderr
    *_, heading, row = run.stdout.splitlines()
    assert heading.split() == ["rate", "momentum", "width", "epochs", "held-out", "accuracy"]
    assert re.fullmatch(r" *\d\.\d{4} +0\.[09] +\d+ +1 +[01]\.\d{4}", row)


@pytest.mark.timeout(240)
def test_a_worker_is_killed_and_the_others_go_on():
    run = run_example("elastic_ray.py", "--kill", "--epochs", "2", "--pause", "0.02")
    assert run.returncode == 0, run.stderr
    assert re.search(r"rank 1 is process \d+", run.stdout)
    assert re.search(r"world 1: 1 rank, rank 1 on host \S+ lost \((died: .*|ended)\), resumed after", run.stderr)
    assert re.search(r"parameters: bit for bit the same on (\d) of \1 ranks", run.stdout)


@pytest.mark.timeout(240)
def test_the_script_of_the_elastic_ray_job(tmp_path):
    """Ray has four slots here, as many as the pods of its cluster on Kubernetes."""
    yaml = pytest.importorskip("yaml")
    manifest = ROOT / "docs" / "launch" / "files" / "kubernetes" / "rayjob_elastic.yaml"
    script = next(yaml.safe_load_all(manifest.read_text()))["data"]["train.py"]
    assert "args=[100]" in script
    start = "import ray\nray.init('local', num_cpus=4, include_dashboard=False)\n"
    (tmp_path / "train.py").write_text(start + script.replace("args=[100]", "args=[1]"))
    run = run_example(tmp_path / "train.py")
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1] == "workers at the end: 4"
