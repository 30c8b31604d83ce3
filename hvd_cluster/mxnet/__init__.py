"""Horovod's API on MXNet: ``import hvd_cluster.mxnet as hvd``, also before ``import mxnet``."""

from hvd_cluster import numpy_for_mxnet as _numpy_for_mxnet

try:
    _numpy_for_mxnet.register()
    import mxnet as _mxnet  # noqa: F401
except (ImportError, OSError) as _error:
    raise ImportError(
        f"hvd_cluster.mxnet needs MXNet, which cannot be imported ({_error}); to install it: "
        "python -m hvd_cluster.install_mxnet"
    ) from _error

from hvd_cluster.mxnet import mpi_ops as _mpi_ops
from hvd_cluster.mxnet.functions import allgather_object, broadcast_object, broadcast_parameters, set_seed
from hvd_cluster.mxnet.gradients import Compression
from hvd_cluster.mxnet.mpi_ops import *  # noqa: F403
from hvd_cluster.mxnet.optimizer import DistributedOptimizer
from hvd_cluster.mxnet.trainer import DistributedTrainer
from hvd_cluster.reports import MetricLogger, RankFilter, count_samples, metrics, print_once

__all__ = ["Compression", "DistributedOptimizer", "DistributedTrainer", "allgather_object", "broadcast_object"]
__all__ += ["MetricLogger", "RankFilter", "broadcast_parameters", "count_samples", "metrics", "print_once", "set_seed"]
__all__ += _mpi_ops.__all__
