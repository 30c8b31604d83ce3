"""The result of a fit with torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TorchModel:
    """What a TorchEstimator has trained."""

    history: Any = None
    model: Any = None
    feature_columns: Any = None
    input_shapes: Any = None
    label_columns: Any = None
    optimizer: Any = None
    run_id: Any = None
    _metadata: Any = field(default=None)
    loss: Any = None
    loss_constructors: Any = None

    def getModel(self) -> Any:
        """The model of torch."""
        return self.model

    def getHistory(self) -> Any:
        """A dictionary for each epoch."""
        return self.history
