"""The versions of the libraries that a job may use."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from importlib import metadata

from executors.api import ExecutorError
from executors.mpi.library import find_mpirun
from hvd_cluster import __version__

__all__ = ["installed_versions"]

DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "keras": ("keras",),
    "jax": ("jax",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "nccl4py": ("nccl4py",),
    "mpi4py": ("mpi4py",),
    "pygloo": ("pygloo",),
    "cryptography": ("cryptography",),
    "ray": ("ray",),
    "pyspark": ("pyspark",),
}
"""The distributions that bring each library; the first that is installed counts."""


def installed_versions() -> dict[str, str | None]:
    """The version of each library, None for those that are missing. Imports none of them."""
    versions: dict[str, str | None] = {"hvd-cluster": __version__, "python": platform.python_version()}
    versions |= {name: _first(candidates) for name, candidates in DISTRIBUTIONS.items()}
    return versions | {"mpirun": _mpirun()}


def _first(distributions: tuple[str, ...]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _mpirun() -> str | None:
    try:
        found = find_mpirun(os.environ)
    except (ExecutorError, ValueError):
        return None
    return f"{found.library.value}, {found.program}"
