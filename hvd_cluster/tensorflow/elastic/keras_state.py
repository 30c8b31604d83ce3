"""The state of a training with Keras, under Horovod's name for it."""

from __future__ import annotations

from typing import Any

from hvd_cluster.keras.elastic.state import KerasState

__all__ = ["TensorFlowKerasState"]


class TensorFlowKerasState(KerasState):
    """A :class:`~hvd_cluster.keras.elastic.KerasState`; ``backend`` is accepted for compatibility and not needed."""

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)
