"""Estimators of Spark ML for Lightning: ``from hvd_cluster.spark.lightning import LightningEstimator``.

A name loads at its first use: a worker trains without Spark ML, which takes half a second to load. ``TorchEstimator``
and ``TorchModel`` are Horovod's names for the two classes.
"""

from typing import TYPE_CHECKING

from collectives import facade

if TYPE_CHECKING:
    from hvd_cluster.spark.lightning.estimator import LightningEstimator, LightningModel

    TorchEstimator, TorchModel = LightningEstimator, LightningModel
else:
    _load = facade(__name__, {"estimator": "LightningEstimator LightningModel"})

    def __getattr__(name: str) -> object:
        return _load({"TorchEstimator": "LightningEstimator", "TorchModel": "LightningModel"}.get(name, name))


__all__ = ["LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
