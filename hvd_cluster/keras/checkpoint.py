"""A checkpoint of the best model so far, whose place is told later."""

from __future__ import annotations

from typing import Any

import keras

from collectives.api import InvalidRequestError

__all__ = ["BestModelCheckpoint"]

_UNTOLD = {False: "untold.keras", True: "untold.weights.h5"}


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint with ``save_best_only``. Set ``filepath`` before the training, on the rank that shall write::

        best = hvd.callbacks.BestModelCheckpoint(monitor="val_loss")
        best.filepath = "best.keras"

    InvalidRequestError where a training begins without it.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(
            filepath=_UNTOLD[save_weights_only],
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: str | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Check that the place is known."""
        if not self.filepath:
            raise InvalidRequestError("BestModelCheckpoint has no filepath; set callback.filepath before model.fit")
        super().on_train_begin(logs)
