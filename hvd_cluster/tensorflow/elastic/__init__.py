"""Parts for training with a changing number of ranks."""

from hvd_cluster.elastic.batches import GlobalBatches
from hvd_cluster.elastic.session import drain
from hvd_cluster.elastic.state import ObjectState, State
from hvd_cluster.tensorflow.elastic.keras_state import TensorFlowKerasState
from hvd_cluster.tensorflow.elastic.loop import run
from hvd_cluster.tensorflow.elastic.state import TensorFlowState

__all__ = [
    "GlobalBatches",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "drain",
    "run",
]
