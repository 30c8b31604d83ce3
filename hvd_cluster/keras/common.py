"""The common names of ``hvd_cluster.keras`` and ``hvd_cluster.tensorflow.keras``."""

from hvd_cluster.core.basics import (
    add_process_set,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from hvd_cluster.core.features import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvd_cluster.core.observation import start_timeline, stop_timeline
from hvd_cluster.core.process_sets import ProcessSet, global_process_set
from hvd_cluster.keras.broadcasting import broadcast_global_variables
from hvd_cluster.keras.compression import Compression
from hvd_cluster.keras.evaluation import evaluate
from hvd_cluster.keras.optimizer import PartialDistributedOptimizer
from hvd_cluster.keras.saving import load_model
from hvd_cluster.keras.sync_batch_norm import SyncBatchNormalization
from hvd_cluster.keras.values import allgather, allreduce, broadcast, reducescatter
from hvd_cluster.ops.arguments import Adasum, Average, Sum

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "evaluate",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
