"""The features of this version, in Horovod's words: what is built, what is enabled, and which bindings there are."""

from __future__ import annotations

from importlib.util import find_spec

from collectives import InvalidRequestError, mpi_library
from hvd_cluster.core import basics

EXTENSIONS = ["tensorflow", "torch", "mxnet"]


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Whether there is a binding for the framework ``ext_base_name``, such as "torch", and the framework itself."""
    return all(find_spec(name) is not None for name in (f"hvd_cluster.{ext_base_name}", ext_base_name))


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """ImportError where there is no binding ``ext_name``, such as "horovod.torch"; the other arguments are not needed.

    They are about how Horovod's extensions are compiled.
    """
    framework = ext_name.removeprefix("horovod.")
    if not extension_available(framework):
        raise ImportError(f"{ext_name} needs a binding of hvd-cluster for {framework}, and {framework} itself")


def mpi_built() -> bool:
    """Whether ranks can talk through MPI: true if mpi4py is installed and finds the library of an MPI."""
    return mpi_library.is_available()


def mpi_enabled() -> bool:
    """Whether the ranks have found one another by MPI, or talk through it; False before ``init()``."""
    return basics.has_mpi()


def mpi_threads_supported() -> bool:
    """Whether several threads may call MPI at the same time: whether it has MPI_THREAD_MULTIPLE.

    Raises InvalidRequestError if MPI is not in use; NotInitializedError before ``init()``.
    """
    basics.engine()
    if not basics.has_mpi():
        raise InvalidRequestError(
            "MPI is not in use, so mpi_threads_supported() has no answer; ask mpi_enabled() first"
        )
    mpi = mpi_library.loaded_mpi()
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Whether ranks on different hosts can talk through Gloo: true if torch with Gloo is installed, or pygloo."""
    from collectives import registry

    try:
        registry.preload_gloo()
    except ImportError:
        return False
    return True


def gloo_enabled() -> bool:
    """Whether ranks find each other without MPI and talk through Gloo where necessary: true if Gloo is available."""
    return gloo_built() and not mpi_enabled()


def nccl_built() -> int:
    """The version of NCCL with which operations run on tensors on GPUs, such as 22105; 0 where this host cannot."""
    from collectives import nccl_bootstrap

    return 0 if nccl_bootstrap.unavailable() else nccl_bootstrap.load().version


def ddl_built() -> bool:
    """Whether ranks can talk through IBM's DDL: no."""
    return False


def ccl_built() -> bool:
    """Whether ranks can talk through oneCCL: no."""
    return False


def cuda_built() -> bool:
    """Whether operations accept tensors on a CUDA device: true where this host has a GPU, cupy and NCCL."""
    from collectives import nccl_bootstrap

    return not nccl_bootstrap.unavailable()


def rocm_built() -> bool:
    """Whether operations accept tensors on a ROCm device: no, they must be moved to the CPU first."""
    return False
