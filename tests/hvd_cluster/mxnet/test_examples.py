"""The examples of MXNet: accuracy, and equal parameters on all ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hvd_cluster.mxnet.pool import load

load()
ROOT = Path(__file__).parents[3]
HVDRUN = [sys.executable, "-m", "hvd_cluster", "-np", "2"]
GLUON, MODULE = (f"examples/mxnet_mnist_{name}.py" for name in ("gluon", "module"))


@pytest.mark.parametrize(
    "command",
    [
        [*HVDRUN, sys.executable, GLUON],
        [*HVDRUN, "--horovod-alias", sys.executable, MODULE],
        [sys.executable, GLUON, "--num-proc", "2", "--fp16-allreduce"],
    ],
    ids=["gluon", "module", "run"],
)
def test_an_example(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"accuracy (\d\.\d{4})$", done.stdout, re.MULTILINE)[1]) >= 0.95
    assert re.search(r"parameters: bit for bit the same on 2 of 2 ranks, sha256 [0-9a-f]{16}\n", done.stdout)
