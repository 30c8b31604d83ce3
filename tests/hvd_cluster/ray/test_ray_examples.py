"""The elastic example for Ray runs, as a driver with a cluster of its own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import startup

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(240)
def test_a_worker_is_killed_and_the_others_go_on():
    run = subprocess.run(
        [sys.executable, ROOT / "examples" / "elastic_ray.py", "--kill", "--epochs", "2", "--pause", "0.02"],
        env={**os.environ, "PYTHONPATH": startup.PATH, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"rank 1 is process \d+", run.stdout)
    assert re.search(r"world 1: 1 rank, rank 1 on host \S+ lost \((died: .*|ended)\), resumed after", run.stderr)
    assert re.search(r"parameters: bit for bit the same on (\d) of \1 ranks", run.stdout)
