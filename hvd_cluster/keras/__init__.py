"""Horovod's API for Keras 3 on any of its backends: ``import hvd_cluster.keras as hvd``.

It imports no framework but the one that Keras uses, and that only when it is needed.
"""

try:
    import keras as _keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ImportError('hvd_cluster.keras needs Keras 3: pip install "hvd-cluster[tensorflow]"') from error

from hvd_cluster.basics import (
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
from hvd_cluster.capabilities import (
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
from hvd_cluster.keras import callbacks, elastic
from hvd_cluster.keras.broadcasting import broadcast_global_variables
from hvd_cluster.keras.compression import Compression
from hvd_cluster.keras.evaluation import evaluate
from hvd_cluster.keras.models import load_model
from hvd_cluster.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvd_cluster.keras.sync_batch_norm import SyncBatchNormalization
from hvd_cluster.keras.values import allgather, allreduce, broadcast, reducescatter
from hvd_cluster.operations.reductions import Adasum, Average, Sum
from hvd_cluster.process_sets import ProcessSet, global_process_set
from hvd_cluster.timeline import start_timeline, stop_timeline

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
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

if int(_keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"hvd_cluster.keras needs Keras 3, not {_keras.__version__}")
