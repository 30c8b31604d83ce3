"""Estimators of Spark ML for models of Keras 3: ``from hvd_cluster.spark.keras import KerasEstimator``.

A name loads at its first use: a worker trains without Spark ML, which takes half a second to load.
"""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from hvd_cluster.spark.keras.estimator import KerasEstimator
    from hvd_cluster.spark.keras.model import KerasModel
else:
    __getattr__ = facade(__name__, {"estimator": "KerasEstimator", "model": "KerasModel"})

__all__ = ["KerasEstimator", "KerasModel"]
