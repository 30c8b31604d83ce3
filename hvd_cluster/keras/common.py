"""The common names of ``hvd_cluster.keras`` and ``hvd_cluster.tensorflow.keras``."""

from hvd_cluster import common_api as _common_api
from hvd_cluster.common_api import *  # noqa: F403
from hvd_cluster.keras import checkpoint
from hvd_cluster.keras.broadcasting import broadcast_global_variables
from hvd_cluster.keras.compression import Compression
from hvd_cluster.keras.evaluation import evaluate
from hvd_cluster.keras.optimizer import PartialDistributedOptimizer
from hvd_cluster.keras.saving import load_model
from hvd_cluster.keras.sync_batch_norm import SyncBatchNormalization
from hvd_cluster.keras.values import allgather, allreduce, broadcast, reducescatter, set_seed
from hvd_cluster.reports import MetricLogger, RankFilter, count_samples, metrics, print_once

__all__ = [
    "Compression",
    "MetricLogger",
    "PartialDistributedOptimizer",
    "RankFilter",
    "SyncBatchNormalization",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "checkpoint",
    "count_samples",
    "evaluate",
    "load_model",
    "metrics",
    "print_once",
    "reducescatter",
    "set_seed",
]
__all__ += _common_api.__all__
