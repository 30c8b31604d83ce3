"""Parts for training with a changing number of ranks."""

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.tensorflow.elastic.state import TensorFlowKerasState, TensorFlowState, run

__all__ = [
    "GlobalBatches",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "drain",
    "run",
]
