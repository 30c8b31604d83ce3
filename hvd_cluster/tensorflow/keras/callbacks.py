"""The callbacks of :mod:`hvd_cluster.keras.callbacks`."""

from hvd_cluster.keras.callbacks import (
    BestModelCheckpoint,
    BroadcastGlobalVariablesCallback,
    EvaluateCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "EvaluateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
