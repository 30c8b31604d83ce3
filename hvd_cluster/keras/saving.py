"""Saved models: the best one so far, and optimizers that are wrapped again when a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from collectives import InvalidRequestError
from hvd_cluster.gradients.compression import GradientCompression, NoneCompressor
from hvd_cluster.keras.optimizer import DistributedOptimizer
from hvd_cluster.keras.optimizer.distributed import Distributed

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


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type[Any]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: GradientCompression = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """As ``keras.models.load_model``; the optimizer is a DistributedOptimizer, with the ``compression``, and has the
    state that was saved. The file may come from a training without this package.

    ``custom_optimizers`` are classes of your own of optimizers, ``custom_objects`` others by name. InvalidRequestError
    for ``legacy_opts``: Keras 3 has no legacy optimizers.
    """
    if legacy_opts:
        raise InvalidRequestError("Keras 3 has no legacy optimizers; leave legacy_opts out")
    known = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, Distributed):
        model.optimizer = DistributedOptimizer(optimizer, compression=compression)
        if keras.backend.backend() == "tensorflow":
            model.jit_compile = False  # chosen for an optimizer without collectives
    return model
