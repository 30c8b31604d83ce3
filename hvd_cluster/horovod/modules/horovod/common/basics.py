"""The functions that each of Horovod's bindings takes from an object of this class."""

from __future__ import annotations

from typing import NoReturn

from hvd_cluster.core import basics, features
from hvd_cluster.horovod.finder import STAND_IN
from hvd_cluster.ops.arguments import Adasum, Average, Max, Min, Product, Sum

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions of the one engine of this process; the arguments, about a compiled library, are not needed."""

    Average, Sum, Adasum, Min, Max, Product = Average, Sum, Adasum, Min, Max, Product

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    rank = staticmethod(basics.rank)
    size = staticmethod(basics.size)
    local_rank = staticmethod(basics.local_rank)
    local_size = staticmethod(basics.local_size)
    cross_rank = staticmethod(basics.cross_rank)
    cross_size = staticmethod(basics.cross_size)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)
    mpi_threads_supported = staticmethod(features.mpi_threads_supported)
    mpi_enabled = staticmethod(features.mpi_enabled)
    mpi_built = staticmethod(features.mpi_built)
    gloo_enabled = staticmethod(features.gloo_enabled)
    gloo_built = staticmethod(features.gloo_built)
    nccl_built = staticmethod(features.nccl_built)
    ddl_built = staticmethod(features.ddl_built)
    ccl_built = staticmethod(features.ccl_built)
    cuda_built = staticmethod(features.cuda_built)
    rocm_built = staticmethod(features.rocm_built)

    def __init__(self, pkg_path: str, *args: str) -> None:
        """Load nothing: there is no compiled library."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{STAND_IN} {__name__}.HorovodBasics.{name}", name=name, obj=self)
