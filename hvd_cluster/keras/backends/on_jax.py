"""Keras on JAX."""

from __future__ import annotations

from typing import Any

from collectives import UnsupportedRequestError
from hvd_cluster.gradients.lists import ListBinding
from hvd_cluster.jax.arrays import is_traced
from hvd_cluster.jax.lists import JaxLists, total
from hvd_cluster.keras.backends import Operations

__all__ = ["in_graph", "lists", "total"]


def lists(device_dense: str, device_sparse: str) -> ListBinding:
    return JaxLists()


def in_graph(value: Any) -> Operations | None:
    if is_traced(value):
        raise UnsupportedRequestError(
            "JAX traces this function, such as a train_step() of Keras, and a collective cannot run in it: return the "
            "tensor, as a metric or in the logs, and call the operation outside of the function, for instance in a "
            "callback; hvd.callbacks.MetricAverageCallback averages all logs. Or set KERAS_BACKEND=tensorflow"
        )
    return None
