"""The layers whose gradients stay on their rank."""

from __future__ import annotations

from typing import Any

from collectives.api import InvalidRequestError

__all__ = ["trainable_weights"]


def trainable_weights(layers: Any) -> list[Any]:
    """The trainable variables of ``layers``: a Keras layer, a list of them, or None.

    InvalidRequestError for anything else, and for a layer that is not built: its variables do not exist yet.
    """
    if layers is None:
        return []
    found: list[Any] = []
    for layer in layers if isinstance(layers, list | tuple) else [layers]:
        if not hasattr(layer, "trainable_weights"):
            raise InvalidRequestError(
                f"local_layers must be a Keras layer or a list of Keras layers, not of {type(layer).__name__}"
            )
        if not getattr(layer, "built", True):
            raise InvalidRequestError(f"the local layer {layer.name!r} has no variables yet; call layer.build() first")
        found += layer.trainable_weights
    return found
