"""The examples with Keras and TensorFlow."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import startup
from tests.hvd_cluster.keras.conftest import BACKENDS

ROOT = Path(__file__).parents[3]
AGREE = r"parameters: bit for bit the same on 2 of 2 ranks, sha256 [0-9a-f]{16}"
HVDRUN = [sys.executable, "-m", "hvd_cluster", "-np", "2"]


@pytest.mark.parametrize(
    ("name", "backend", "options", "told"),
    [
        ("keras_digits.py", "torch", [], r"epoch  1   loss \d\.\d{4}   held-out accuracy [01]\.\d{4}"),
        ("tensorflow_digits.py", "tensorflow", [], r"epoch  1   loss \d\.\d{4}   held-out accuracy [01]\.\d{4}"),
        ("elastic_keras.py", "torch", ["--min-np", "1"], r"epoch  1   ranks 2   held-out accuracy [01]\.\d{4}"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.endswith(".py") else "",
)
def test_all_ranks_agree(name, backend, options, told):
    if backend not in BACKENDS:
        pytest.skip(f"{backend} is not installed")
    command = [*HVDRUN, *options, sys.executable, str(ROOT / "examples" / name), "--epochs", "1"]
    variables = {**os.environ, "PYTHONPATH": startup.PATH, "KERAS_BACKEND": backend}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100, env=variables)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("[0]<stdout>:") for line in done.stdout.splitlines() if line.startswith("[0]")]
    epoch, verdict = [line for line in lines if not line.startswith("rank")]
    assert re.fullmatch(told, epoch)
    assert re.fullmatch(AGREE, verdict)
