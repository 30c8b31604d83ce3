"""Estimators of Spark ML for Lightning: ``from hvd_cluster.spark.lightning import LightningEstimator``."""

from hvd_cluster.spark.lightning.estimator import LightningEstimator, LightningModel

__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]

TorchEstimator = LightningEstimator
"""Horovod's name."""
TorchModel = LightningModel
"""Horovod's name."""
