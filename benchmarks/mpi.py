"""The MPI peer of benchmarks.operations: Allreduce of NumPy buffers by mpi4py, in processes that mpirun starts.

Its ranks are processes of their own, because MPI and Horovod's launchers cannot start the same ones.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import in_rows, interleave
from benchmarks.sizes import Turns, label, parse_size, turns_for

__all__ = ["Unavailable", "launch"]

LAUNCH_SECONDS = 600.0
INSTALL = "pip install 'hvd-cluster[bench]'"


class Unavailable(Exception):
    """MPI cannot be measured here, for the reason in the text."""


def launch(ranks: int, sizes: list[int], tensors: int, scale: float) -> list[float]:
    """Median seconds of each case, in the order of the arguments; Unavailable says why there are none."""
    with tempfile.TemporaryDirectory(prefix="hvd-benchmark-") as folder:
        output = Path(folder) / "seconds.json"
        options = ["--tensors", str(tensors), "--scale", str(scale), "--output", str(output), "--ranks", str(ranks)]
        script = [sys.executable, "-m", "benchmarks.mpi", "--sizes", *map(str, sizes), *options]
        _run([_mpirun(), "-np", str(ranks), *_placement(ranks), *script])
        seconds: list[float] = json.loads(output.read_text())
    return seconds


def _mpirun() -> str:
    """The one beside this Python first: wheels put it there."""
    if importlib.util.find_spec("mpi4py") is None:
        raise Unavailable(f"mpi4py is not installed; {INSTALL}")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    found = shutil.which("mpirun", path=path)
    if found is None:
        raise Unavailable(f"there is no mpirun; {INSTALL}")
    return found


def _placement(ranks: int) -> list[str]:
    return ["--map-by", ":OVERSUBSCRIBE"] if ranks > len(os.sched_getaffinity(0)) else []


def _run(command: list[str]) -> None:
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    try:
        subprocess.run(
            command, env={**os.environ, **as_root}, check=True, timeout=LAUNCH_SECONDS, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        lines = [line for line in (error.stderr or "").splitlines() if line.strip(" -")]
        raise Unavailable(": ".join([f"mpirun ended with code {error.returncode}", *lines[-1:]])) from error
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"mpirun did not end within {LAUNCH_SECONDS:g} s") from error


def measure(communicator: Any, sizes: list[int], tensors: int, scale: float) -> list[float]:
    """Runs on every rank; median seconds of each case, of calls in a row."""
    cases = [(_single(communicator, nbytes), turns_for(nbytes, scale)) for nbytes in sizes]
    if tensors:
        cases.append((_many(communicator, tensors, 20 << 10), Turns(max(3, int(10 * scale)), 3)))
    seconds = [(interleave({"mpi": call}, *turns)["mpi"], turns.calls) for call, turns in cases]
    return [statistics.median(in_rows(each, calls)) for each, calls in seconds]


def _single(communicator: Any, nbytes: int) -> Callable[[], None]:
    import numpy as np
    from mpi4py import MPI

    buffer = np.ones(nbytes // 4, np.float32)
    communicator.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
    assert (buffer == communicator.size).all(), f"MPI's sum of {label(nbytes)} is wrong"
    buffer[:] = 0.0
    return lambda: communicator.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)


def _many(communicator: Any, count: int, nbytes: int) -> Callable[[], None]:
    import numpy as np
    from mpi4py import MPI

    buffers = [np.full(nbytes // 4, 0.0, np.float32) for _ in range(count)]

    def run() -> None:
        MPI.Request.Waitall([communicator.Iallreduce(MPI.IN_PLACE, buffer, MPI.SUM) for buffer in buffers])

    return run


def main() -> None:
    """On each rank, started by :func:`launch`."""
    from mpi4py import MPI

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, required=True, help="how many there should be")
    parser.add_argument("--sizes", type=parse_size, nargs="+", required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--scale", type=float, required=True)
    parser.add_argument("--output", type=Path, required=True, help="where rank 0 writes the seconds, as JSON")
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    if world.size != arguments.ranks:
        sys.exit(f"mpi4py sees {world.size} ranks instead of {arguments.ranks}: mpirun is of another MPI")
    seconds = measure(world, arguments.sizes, arguments.tensors, arguments.scale)
    if world.rank == 0:
        arguments.output.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
