"""Estimators of Spark ML for models of torch: ``from hvd_cluster.spark.torch import TorchEstimator``."""

from hvd_cluster.spark.torch.callbacks import EarlyStopping, FitCallback, SchedulerCallback
from hvd_cluster.spark.torch.estimator import TorchEstimator
from hvd_cluster.spark.torch.model import TorchModel

__all__ = ["EarlyStopping", "FitCallback", "SchedulerCallback", "TorchEstimator", "TorchModel"]
