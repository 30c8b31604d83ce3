"""Horovod's API for Keras on TensorFlow: ``import hvd_cluster.tensorflow.keras as hvd``.

The objects are those of :mod:`hvd_cluster.keras`; only the order of some arguments is another one.
"""

from hvd_cluster.keras import common
from hvd_cluster.keras.common import *  # noqa: F403
from hvd_cluster.tensorflow.keras import callbacks, elastic
from hvd_cluster.tensorflow.keras.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "callbacks", "elastic"]
__all__ += common.__all__
