"""The framework below Keras. Each module here has what the binding needs of one, and is imported only for it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Protocol

import keras

from collectives import InvalidRequestError
from hvd_cluster.core.process_sets import ProcessSet
from hvd_cluster.gradients.lists import ListBinding

__all__ = ["KerasBackend", "Operations", "backend", "in_graph"]

KNOWN = ("tensorflow", "torch", "jax")


class Operations(Protocol):
    """The operations of a framework on its own tensors, which may be nodes of a graph."""

    def allreduce(self, tensor: Any, **arguments: Any) -> Any:
        """As :func:`hvd_cluster.tensorflow.allreduce`; likewise all of these."""

    def allgather(self, tensor: Any, **arguments: Any) -> Any:
        """The rows of all ranks."""

    def broadcast(self, tensor: Any, root_rank: int, **arguments: Any) -> Any:
        """The tensor of one rank."""

    def reducescatter(self, tensor: Any, **arguments: Any) -> Any:
        """This rank's rows of the result."""


class KerasBackend(Protocol):
    """A module for a framework."""

    def lists(self, device_dense: str, device_sparse: str) -> ListBinding:
        """Its operations on lists of gradients. Devices are names of TensorFlow; others do not use them."""

    def total(self, tensor: Any, name: str, process_set: ProcessSet) -> Any:
        """The sum of ``tensor`` over the ranks, whose gradient is the sum of the ranks' gradients."""

    def in_graph(self, value: Any) -> Operations | None:
        """The operations for a call with ``value`` that is traced now; None for a call that runs at once.

        InvalidRequestError where nothing can run in a function that is traced.
        """


def backend() -> KerasBackend:
    """The module for the backend that Keras uses; InvalidRequestError for one that is not supported."""
    name = keras.backend.backend()
    if name not in KNOWN:
        raise InvalidRequestError(f"Keras runs on {name!r}; set KERAS_BACKEND to one of: {', '.join(KNOWN)}")
    module: Any = import_module(f"{__name__}.on_{name}")
    result: KerasBackend = module
    return result


def in_graph(value: Any) -> Operations | None:
    """The module of the backend of Keras; None for one that is not supported."""
    return backend().in_graph(value) if keras.backend.backend() in KNOWN else None


setattr(in_graph, "autograph_info__", {})  # noqa: B010 - AutoGraph shall call it and not convert it, or it warns
