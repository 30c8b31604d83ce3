"""Callbacks of ``model.fit`` for training on many ranks, on every backend of Keras."""

from hvd_cluster.keras.broadcasting import BroadcastGlobalVariablesCallback
from hvd_cluster.keras.evaluation import EvaluateCallback, MetricAverageCallback, MetricLoggerCallback
from hvd_cluster.keras.learning_rate import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvd_cluster.keras.saving import BestModelCheckpoint

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EvaluateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "MetricLoggerCallback",
]
