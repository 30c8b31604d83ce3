"""The callbacks of elastic jobs, with the backend of Keras, which is not needed, as their first argument."""

from __future__ import annotations

from hvd_cluster.horovod.with_backend import WithBackend
from hvd_cluster.keras import elastic

__all__ = ["CommitStateCallbackImpl", "UpdateBatchStateCallbackImpl", "UpdateEpochStateCallbackImpl"]


class CommitStateCallbackImpl(WithBackend, elastic.CommitStateCallback):
    """A :class:`hvd_cluster.keras.elastic.CommitStateCallback`."""


class UpdateBatchStateCallbackImpl(WithBackend, elastic.UpdateBatchStateCallback):
    """An :class:`hvd_cluster.keras.elastic.UpdateBatchStateCallback`."""


class UpdateEpochStateCallbackImpl(WithBackend, elastic.UpdateEpochStateCallback):
    """An :class:`hvd_cluster.keras.elastic.UpdateEpochStateCallback`."""
