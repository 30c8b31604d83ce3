"""The layers of Keras: whether their variables are there, and those whose gradients stay on their rank."""

from __future__ import annotations

from typing import Any

from collectives.api import InvalidRequestError

__all__ = ["is_complete", "trainable_weights"]


def is_complete(layer: Any) -> bool:
    """Whether no call makes more variables of a layer or a model of Keras.

    ``build()`` of a subclass without one of its own marks it as built, and its layers are not. Layers that a call did
    not reach stay as they are.
    """
    if not getattr(layer, "built", True):
        return False
    inner = getattr(layer, "_flatten_layers", tuple)
    return getattr(layer, "_called", False) or all(each.built for each in inner())


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
        if not is_complete(layer):
            raise InvalidRequestError(
                f"the local layer {layer.name!r} has no variables yet, or not all: call it on a batch first, or its "
                "build() if it has one of its own"
            )
        found += layer.trainable_weights
    return found
