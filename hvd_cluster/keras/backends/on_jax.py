"""Keras on JAX."""

from __future__ import annotations

from hvd_cluster.jax.lists import JaxLists, total
from hvd_cluster.optimizer.lists import ListBinding

__all__ = ["lists", "total"]


def lists(device_dense: str, device_sparse: str) -> ListBinding:
    """See :class:`Backend`."""
    return JaxLists()
