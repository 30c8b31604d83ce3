"""Parts for training with a changing number of ranks."""

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.keras.elastic.callbacks import (
    CommitStateCallback,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    rest_of_epoch,
)
from hvd_cluster.keras.elastic.state import KerasState, run

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
