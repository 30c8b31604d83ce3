"""Horovod's API on PyTorch: ``import hvd_cluster.torch as hvd``."""

from functools import partial as _partial
from typing import TYPE_CHECKING as _TYPE_CHECKING

from hvd_cluster.imports import binding_of as _binding_of

with _binding_of("torch", "hvd_cluster.torch needs PyTorch", "torch"):
    import torch as _torch

    from collectives import facade as _facade
    from collectives import phases as _phases
    from hvd_cluster.core.features import check_extension
    from hvd_cluster.core.launchers import register_thread_count as _register_thread_count
    from hvd_cluster.gradients.compression import GradientCompressor
    from hvd_cluster.ops.objects import allgather_object, broadcast_object
    from hvd_cluster.reports import MetricLogger, RankFilter, count_samples, metrics, print_once
    from hvd_cluster.torch import kernels as _kernels
    from hvd_cluster.torch import mpi_ops as _mpi_ops
    from hvd_cluster.torch.functions import (
        broadcast_optimizer_state,
        broadcast_parameters,
        clip_grad_norm_,
        full_state_dict,
        set_seed,
    )
    from hvd_cluster.torch.mpi_ops import *  # noqa: F403
    from hvd_cluster.torch.optimizer import DistributedOptimizer

if _TYPE_CHECKING:
    from hvd_cluster.torch import checkpoint, elastic
    from hvd_cluster.torch.sync_batch_norm import SyncBatchNorm
else:
    __getattr__ = _facade(
        __name__, {"sync_batch_norm": "SyncBatchNorm"}, {"checkpoint": "checkpoint", "elastic": "elastic"}
    )

__all__ = [
    "DistributedOptimizer",
    "GradientCompressor",
    "MetricLogger",
    "RankFilter",
    "SyncBatchNorm",
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
    "checkpoint",
    "clip_grad_norm_",
    "count_samples",
    "elastic",
    "full_state_dict",
    "metrics",
    "print_once",
    "set_seed",
]
__all__ += _mpi_ops.__all__
# Horovod shows these in mpi_ops only; each line on its own, because mypy reads nothing else.
__all__.remove("Handle")
__all__.remove("HandleGroup")
__all__.remove("HorovodAllgather")
__all__.remove("HorovodAllreduce")
__all__.remove("HorovodAlltoall")
__all__.remove("HorovodBroadcast")
__all__.remove("HorovodGroupedAllgather")
__all__.remove("HorovodGroupedAllreduce")
__all__.remove("HorovodGroupedReducescatter")
__all__.remove("HorovodReducescatter")

_kernels.register()
_profiler = _torch.autograd.profiler  # looked up once: the engine asks before each operation
_phases.register(_partial(getattr, _profiler, "_is_profiler_enabled"), _torch.profiler.record_function)
_register_thread_count("torch", _torch.get_num_threads)


def _check_has_gpu() -> bool:
    """Whether torch sees a GPU; the name is Horovod's."""
    return _torch.cuda.is_available()
