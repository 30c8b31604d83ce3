"""Horovod's API on TensorFlow: ``import hvd_cluster.tensorflow as hvd``."""

import os as _os
from typing import Any as _Any

try:
    import tensorflow as _tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError('hvd_cluster.tensorflow needs TensorFlow: pip install "hvd-cluster[tensorflow]"') from error

from hvd_cluster.core.basics import add_process_set, remove_process_set
from hvd_cluster.core.features import check_extension
from hvd_cluster.core.launchers import register_thread_count as _register_thread_count
from hvd_cluster.core.observation import count_samples, metrics
from hvd_cluster.tensorflow import elastic
from hvd_cluster.tensorflow import threads as _threads
from hvd_cluster.tensorflow.compression import Compression
from hvd_cluster.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvd_cluster.tensorflow.mpi_ops import (
    Adasum,
    Average,
    HorovodInternalError,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    reducescatter,
    rocm_built,
    shutdown,
    size,
    size_op,
    start_timeline,
    stop_timeline,
)
from hvd_cluster.tensorflow.optimizer.aggregation import (
    LocalGradientAggregationHelper,
    LocalGradientAggregationHelperEager,
)
from hvd_cluster.tensorflow.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvd_cluster.tensorflow.optimizer.wrapping import DistributedOptimizer
from hvd_cluster.tensorflow.util import _check_has_gpu as _check_has_gpu

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LocalGradientAggregationHelper",
    "LocalGradientAggregationHelperEager",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "count_samples",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_threads.limit_threads(_os.environ)
_register_thread_count("tensorflow", _threads.count_threads)


def __getattr__(name: str) -> _Any:
    """SyncBatchNormalization is a layer of Keras, which is imported only for it."""
    if name == "SyncBatchNormalization":
        from hvd_cluster.keras.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
