"""The binding on workers of Ray and of Spark, and under mpirun: equal parameters on all ranks, to the last bit.

The environment of MXNet has none of the three. That of development has them, for the same version of Python, and with
the same versions of all that both have. So jobs here find its packages through PYTHONPATH.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hvd_cluster.mxnet.pool import load
from tests.mpi import AS_ROOT, DEVELOPMENT, FLAGS, mpirun

load()
HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = DEVELOPMENT / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
SECONDS = 280
pytestmark = pytest.mark.timeout(SECONDS + 20)


def completed(command, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def require(package):
    """Skip the test unless the environment of development has the ``package`` for this version of Python."""
    if not (PACKAGES / package).is_dir():
        pytest.skip(f"there is no {PACKAGES / package}: make environment, with this version of Python, installs it")


@pytest.mark.parametrize(("cluster", "package"), [("ray", "ray"), ("spark", "pyspark")])
def test_a_function_on_the_workers_of_a_cluster(cluster, package):
    require(package)
    if cluster == "spark" and shutil.which("java") is None:
        pytest.skip("Java is not installed: apt-get install openjdk-17-jre-headless")
    paths = [str(HERE.parent / cluster), str(ROOT), str(PACKAGES)]
    told = completed([sys.executable, HERE / "driver.py", cluster], PYTHONPATH=os.pathsep.join(paths))
    found = re.findall(r"^result (\d of \d) (\w{16}) (\w{16})$", told, re.MULTILINE)
    assert [rank for rank, _, _ in found] == ["0 of 2", "1 of 2"]
    starts, ends = {start for _, start, _ in found}, {end for _, _, end in found}
    assert len(starts) == 2
    assert len(ends) == 1
    assert not ends & starts


def test_mpirun(tmp_path):
    command = [
        mpirun("openmpi"),
        *FLAGS["openmpi"],
        "-n",
        "2",
        sys.executable,
        "examples/mxnet_mnist_gluon.py",
        "--epochs",
        "1",
    ]
    told = completed(command, PYTHONPATH=str(ROOT), HOME=str(tmp_path), **AS_ROOT)
    assert re.search(r"^parameters: bit for bit the same on 2 of 2 ranks, sha256 [0-9a-f]{16}$", told, re.MULTILINE)
