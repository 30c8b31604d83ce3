"""Saved models, whose optimizers are wrapped again when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from collectives.api import InvalidRequestError
from hvd_cluster.compression import GradientCompression, NoneCompressor
from hvd_cluster.keras.optimizer import DistributedOptimizer
from hvd_cluster.keras.optimizer.distributed import Distributed

__all__ = ["load_model"]


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
