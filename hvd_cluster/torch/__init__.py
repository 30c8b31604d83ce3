"""Horovod's API on PyTorch: ``import hvd_cluster.torch as hvd``."""

from functools import partial as _partial

try:
    import torch as _torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ImportError('hvd_cluster.torch needs PyTorch: pip install "hvd-cluster[torch]"') from error

from collectives.backends.phases import register as _register_profiler
from hvd_cluster import names as _names
from hvd_cluster.core.features import check_extension
from hvd_cluster.core.launchers import register_thread_count as _register_thread_count
from hvd_cluster.core.metrics import count_samples, metrics
from hvd_cluster.gradients.compression import GradientCompressor
from hvd_cluster.names import *  # noqa: F403
from hvd_cluster.ops.objects import allgather_object, broadcast_object
from hvd_cluster.torch import elastic
from hvd_cluster.torch import kernels as _kernels
from hvd_cluster.torch.compression import Compression
from hvd_cluster.torch.functions import broadcast_optimizer_state, broadcast_parameters
from hvd_cluster.torch.mpi_ops import (
    HorovodInternalError,
    Max,
    Min,
    Product,
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from hvd_cluster.torch.optimizer import DistributedOptimizer
from hvd_cluster.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "GradientCompressor",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "check_extension",
    "count_samples",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "metrics",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += _names.__all__

_kernels.register()
_profiler = _torch.autograd.profiler  # looked up once: the engine asks before each operation
_register_profiler(_partial(getattr, _profiler, "_is_profiler_enabled"), _torch.profiler.record_function)
_register_thread_count("torch", _torch.get_num_threads)


def _check_has_gpu() -> bool:
    """Whether torch sees a GPU; the name is Horovod's."""
    return _torch.cuda.is_available()
