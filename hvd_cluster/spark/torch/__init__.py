"""Estimators of Spark ML for models of torch: ``from hvd_cluster.spark.torch import TorchEstimator``.

A name loads at its first use: a worker trains without Spark ML, which takes half a second to load.
"""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from hvd_cluster.spark.torch.callbacks import EarlyStopping, FitCallback
    from hvd_cluster.spark.torch.estimator import TorchEstimator
    from hvd_cluster.spark.torch.learning_rates import SchedulerCallback
    from hvd_cluster.spark.torch.model import TorchModel
else:
    __getattr__ = facade(
        __name__,
        {
            "callbacks": "EarlyStopping FitCallback",
            "estimator": "TorchEstimator",
            "learning_rates": "SchedulerCallback",
            "model": "TorchModel",
        },
    )

__all__ = ["EarlyStopping", "FitCallback", "SchedulerCallback", "TorchEstimator", "TorchModel"]
