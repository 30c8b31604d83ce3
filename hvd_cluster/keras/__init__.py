"""Horovod's API for Keras 3 on any of its backends: ``import hvd_cluster.keras as hvd``.

It imports no framework but the one that Keras uses, and that only when it is needed.
"""

from hvd_cluster.imports import binding_of as _binding_of

with _binding_of("keras", "hvd_cluster.keras needs Keras 3", "tensorflow"):
    import keras as _keras

    from hvd_cluster.keras import callbacks, common, elastic
    from hvd_cluster.keras.common import *  # noqa: F403
    from hvd_cluster.keras.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", "callbacks", "elastic"]
__all__ += common.__all__

if int(_keras.__version__.partition(".")[0]) < 3:
    raise ImportError(f"hvd_cluster.keras needs Keras 3, not {_keras.__version__}")
