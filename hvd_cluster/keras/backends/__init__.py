"""The framework below Keras. Each module here has what the binding needs of one, and is imported only for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import keras

from collectives.api import InvalidRequestError
from hvd_cluster.optimizer.lists import ListBinding
from hvd_cluster.process_sets import ProcessSet

__all__ = ["Backend", "backend"]

KNOWN = ("tensorflow", "torch", "jax")


class Backend(Protocol):
    """A module for a framework."""

    def lists(self, device_dense: str, device_sparse: str) -> ListBinding:
        """Its operations on lists of gradients. Devices are names of TensorFlow; others do not use them."""

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        """The sum of ``tensor`` over the ranks, whose gradient is the sum of the ranks' gradients."""


def backend() -> Backend:
    """The module for the backend that Keras uses; InvalidRequestError for one that is not supported."""
    name = keras.backend.backend()
    if name not in KNOWN:
        raise InvalidRequestError(f"Keras runs on {name!r}; set KERAS_BACKEND to one of: {', '.join(KNOWN)}")
    module: Any = import_module(f"{__name__}.on_{name}")
    result: Backend = module
    return result
