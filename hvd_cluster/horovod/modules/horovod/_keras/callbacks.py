"""The callbacks under the names from which Horovod's packages for Keras derive theirs.

The first argument of each is the backend of Keras, which is not needed.
"""

from __future__ import annotations

from hvd_cluster.horovod.with_backend import WithBackend
from hvd_cluster.keras import callbacks

__all__ = [
    "BroadcastGlobalVariablesCallbackImpl",
    "LearningRateScheduleCallbackImpl",
    "LearningRateWarmupCallbackImpl",
    "MetricAverageCallbackImpl",
]


class BroadcastGlobalVariablesCallbackImpl(WithBackend, callbacks.BroadcastGlobalVariablesCallback):
    """A :class:`hvd_cluster.keras.callbacks.BroadcastGlobalVariablesCallback`."""


class MetricAverageCallbackImpl(WithBackend, callbacks.MetricAverageCallback):
    """A :class:`hvd_cluster.keras.callbacks.MetricAverageCallback`."""


class LearningRateScheduleCallbackImpl(WithBackend, callbacks.LearningRateScheduleCallback):
    """A :class:`hvd_cluster.keras.callbacks.LearningRateScheduleCallback`."""


class LearningRateWarmupCallbackImpl(WithBackend, callbacks.LearningRateWarmupCallback):
    """A :class:`hvd_cluster.keras.callbacks.LearningRateWarmupCallback`."""
