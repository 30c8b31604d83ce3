"""The parts of :mod:`hvd_cluster.keras.elastic`."""

from hvd_cluster.keras import elastic as _elastic
from hvd_cluster.keras.elastic import *  # noqa: F403

__all__ = _elastic.__all__
