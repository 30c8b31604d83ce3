"""Estimators of Spark ML for models of Keras 3: ``from hvd_cluster.spark.keras import KerasEstimator``."""

from hvd_cluster.spark.keras.estimator import KerasEstimator
from hvd_cluster.spark.keras.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
