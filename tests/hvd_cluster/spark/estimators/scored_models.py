"""Models and estimators for tests of transform, persistence and pipelines."""

import torch
from pyspark.ml import Estimator
from pyspark.ml.param import Param, Params

from hvd_cluster.spark.torch import TorchModel


def adding(*weights, outputs=1):
    """A linear module, whose output number ``i`` is the weighted sum of its inputs plus ``i``."""
    net = torch.nn.Linear(len(weights), outputs)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([weights] * outputs))
        net.bias.copy_(torch.arange(float(outputs)))
    return net


class Mean(Estimator):
    """Fits the mean of ``y`` times ``factor``; the model has the uid of the estimator, as Spark ML does it."""

    factor = Param(Params._dummy(), "factor", "what the mean is multiplied by")
    model = Param(Params._dummy(), "model", "must not come into the fitted model")

    def __init__(self):
        super().__init__()
        self._setDefault(factor=1.0)

    def _fit(self, dataset):
        mean = dataset.agg({"y": "avg"}).first()[0] * self.getOrDefault(self.factor)
        net = adding(0.0)
        with torch.no_grad():
            net.bias.fill_(mean)
        fitted = TorchModel(
            model=net, feature_columns=["x"], label_columns=["y"], _metadata={"y": "double"}, history=[{"loss": mean}]
        )
        return fitted.setOutputCols(["prediction"])._resetUid(self.uid)
