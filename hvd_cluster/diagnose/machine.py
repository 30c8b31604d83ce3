"""The limits and the network interfaces of this machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from collectives import SettingsError, interfaces, usable_cores
from executors import ExecutorError
from executors.agents.mpi import find_mpirun
from hvd_cluster import __version__

SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine: ``cores`` are those that a process may use; ``memory`` is that of the machine, in bytes.

    ``shared_memory`` and ``shared_memory_free`` are the bytes of /dev/shm, 0 where there is none: PyTorch's data
    loaders need it, the backend shm does not. ``descriptors`` is the limit of ``ulimit -n``. ``interfaces`` has the
    address of each network interface, None for one without.
    """

    system: str
    processor: str
    cores: int
    all_cores: int
    memory: int
    shared_memory: int
    shared_memory_free: int
    descriptors: int
    interfaces: dict[str, str | None]

    @classmethod
    def here(cls) -> Machine:
        """The machine that this process runs on."""
        total, free = _shared_memory()
        return cls(
            system=f"{platform.system()} {platform.release()}",
            processor=platform.machine(),
            cores=usable_cores(),
            all_cores=os.cpu_count() or 1,
            memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            shared_memory=total,
            shared_memory_free=free,
            descriptors=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            interfaces={name: _address(name) for name in interfaces.names()},
        )


def _shared_memory() -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _address(interface: str) -> str | None:
    try:
        return interfaces.address_of(interface)
    except SettingsError:
        return None


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
