"""The callbacks of :mod:`hvd_cluster.keras.callbacks`."""

from hvd_cluster.keras import callbacks as _callbacks
from hvd_cluster.keras.callbacks import *  # noqa: F403

__all__ = _callbacks.__all__
