"""Horovod's API for Keras on TensorFlow: ``import hvd_cluster.tensorflow.keras as hvd``.

The objects are those of :mod:`hvd_cluster.keras`; only the order of some arguments is another one.
"""

from hvd_cluster.keras import (
    Average,
    Compression,
    PartialDistributedOptimizer,
    ProcessSet,
    Sum,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
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
from hvd_cluster.tensorflow.keras.optimizer import DistributedOptimizer

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
]
