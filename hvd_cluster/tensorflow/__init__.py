"""Horovod's API on TensorFlow: ``import hvd_cluster.tensorflow as hvd``."""

import os as _os
from typing import Any as _Any

from hvd_cluster.imports import binding_of as _binding_of

with _binding_of("tensorflow", "hvd_cluster.tensorflow needs TensorFlow", "tensorflow"):
    import tensorflow as _tensorflow  # noqa: F401

    from hvd_cluster.core.features import check_extension
    from hvd_cluster.core.launchers import register_thread_count as _register_thread_count
    from hvd_cluster.reports import MetricLogger, RankFilter, count_samples, metrics, print_once
    from hvd_cluster.tensorflow import checkpoint, elastic
    from hvd_cluster.tensorflow import mpi_ops as _mpi_ops
    from hvd_cluster.tensorflow import threads as _threads
    from hvd_cluster.tensorflow.compression import Compression
    from hvd_cluster.tensorflow.functions import (
        BroadcastGlobalVariablesHook,
        allgather_object,
        broadcast_global_variables,
        broadcast_object,
        broadcast_object_fn,
        broadcast_variables,
        set_seed,
    )
    from hvd_cluster.tensorflow.mpi_ops import *  # noqa: F403
    from hvd_cluster.tensorflow.optimizer.aggregation import (
        LocalGradientAggregationHelper,
        LocalGradientAggregationHelperEager,
    )
    from hvd_cluster.tensorflow.optimizer.tape import DistributedGradientTape, PartialDistributedGradientTape
    from hvd_cluster.tensorflow.optimizer.wrapping import DistributedOptimizer
    from hvd_cluster.tensorflow.util import _check_has_gpu as _check_has_gpu

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "LocalGradientAggregationHelperEager",
    "MetricLogger",
    "PartialDistributedGradientTape",
    "RankFilter",
    "SyncBatchNormalization",  # noqa: F405  see __getattr__
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_extension",
    "checkpoint",
    "count_samples",
    "elastic",
    "metrics",
    "print_once",
    "set_seed",
]
__all__ += _mpi_ops.__all__

_threads.limit_threads(_os.environ)
_register_thread_count("tensorflow", _threads.count_threads)


def __getattr__(name: str) -> _Any:
    """SyncBatchNormalization is a layer of Keras, which is imported only for it."""
    if name == "SyncBatchNormalization":
        from hvd_cluster.keras.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
