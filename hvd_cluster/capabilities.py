"""Horovod's "built" and "enabled": the features of this version. Nothing is compiled, so every feature is usable."""

from __future__ import annotations

from collectives.api import InvalidRequestError
from collectives.backends.gloo.binding import preload_gloo
from collectives.backends.nccl.joining import load, unavailable
from hvd_cluster import basics

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_built() -> bool:
    """Whether ranks can talk through MPI: no."""
    return False


def mpi_enabled() -> bool:
    """Whether ranks talk through MPI: no."""
    return False


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads.

    Raises InvalidRequestError, because MPI is not in use; NotInitializedError before ``init()``.
    """
    basics.engine()
    raise InvalidRequestError("MPI is not in use, so mpi_threads_supported() has no answer; ask mpi_enabled() first")


def gloo_built() -> bool:
    """Whether ranks on different hosts can talk through Gloo: true if torch with Gloo is installed, or pygloo."""
    try:
        preload_gloo()
    except ImportError:
        return False
    return True


def gloo_enabled() -> bool:
    """Whether ranks find each other without MPI and talk through Gloo where necessary: true if Gloo is available."""
    return gloo_built()


def nccl_built() -> int:
    """The version of NCCL with which operations run on tensors on GPUs, such as 22105; 0 where this host cannot."""
    return 0 if unavailable() else load().version


def ddl_built() -> bool:
    """Whether ranks can talk through IBM's DDL: no."""
    return False


def ccl_built() -> bool:
    """Whether ranks can talk through oneCCL: no."""
    return False


def cuda_built() -> bool:
    """Whether operations accept tensors on a CUDA device: true where this host has a GPU, cupy and NCCL."""
    return not unavailable()


def rocm_built() -> bool:
    """Whether operations accept tensors on a ROCm device: no, they must be moved to the CPU first."""
    return False
