"""The parts of :mod:`hvd_cluster.keras.elastic`."""

from hvd_cluster.keras.elastic import (
    CommitStateCallback,
    GlobalBatches,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    drain,
    rest_of_epoch,
    run,
)

__all__ = [
    "CommitStateCallback",
    "GlobalBatches",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "drain",
    "rest_of_epoch",
    "run",
]
