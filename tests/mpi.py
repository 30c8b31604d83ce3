"""The MPIs beside the environment of the tests, and scripts for their ranks."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import startup

ROOT = Path(__file__).parents[1]
DEVELOPMENT = Path(sys.prefix.removesuffix("-mxnet"))
"""The environment of development, also for the tests of MXNet, which run in one of their own: see scripts/mxnet."""
FOLDER = DEVELOPMENT / "mpi"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FLAGS = {"openmpi": ["--oversubscribe"], "mpich": []}
SECONDS = 100
ALLREDUCE = """
import numpy, os
from collectives.api import Operation, ReduceOp
from hvd_cluster.core import basics
from hvd_cluster.ops.objects import global_process_set
from hvd_cluster.ops.arrays import in_place
from hvd_cluster.ops.submission import run
basics.init()
numbers = numpy.array([basics.rank() + 1.0])
run(Operation.ALLREDUCE, in_place, numbers, "numbers", global_process_set)
os.write(1, f"{basics.rank()} of {basics.size()}: {numbers[0]}\\n".encode())
"""


def mpirun(name):
    """The path of the mpirun of ``name``, openmpi or mpich; skips the test where it is missing."""
    found = FOLDER / name / "bin" / "mpirun"
    if not found.exists():
        pytest.skip(f"there is no {found}: scripts/environment installs it")
    return str(found)


def environment(name, folder):
    """The variables for a process with mpi4py and the MPI of ``name``; ``folder`` is its home directory."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("mpi4py is not installed")
    mpirun(name)
    own = {"PYTHONPATH": startup.PATH, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    return {**os.environ, **AS_ROOT, **own, "LD_LIBRARY_PATH": str(FOLDER / name / "lib")}


def launch(name, size, command, folder, **variables):
    """Run ``command`` on ``size`` ranks in :func:`environment`, with more ``variables``."""
    return subprocess.run(
        [mpirun(name), *FLAGS[name], "-n", str(size), sys.executable, *command],
        env={**environment(name, folder), **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
