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
    "cross_rank",
    "cross_size",
    "elastic",
    "evaluate",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]

if int(_keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"hvd_cluster.keras needs Keras 3, not {_keras.__version__}")
