"""This process's connection to a Ray cluster."""

from __future__ import annotations

import ray

from executors.api import ExecutorError

__all__ = ["check_connection", "connection", "is_client"]


def connection() -> str | None:
    """The identity of the connection: it changes after ``ray.shutdown()`` and ``ray.init()``; None if not connected."""
    if not ray.is_initialized():
        return None
    identity: str = ray.get_runtime_context().get_worker_id()
    return identity


def check_connection() -> None:
    """Raise ExecutorError unless this process is a driver, a worker or a client of a Ray cluster."""
    # Ray's own functions would connect implicitly, to a new cluster with an authentication of its own.
    if not ray.is_initialized():
        raise ExecutorError("Ray is not initialized; call ray.init() first")


def is_client() -> bool:
    """Whether this process is outside of the cluster, by ``ray.init("ray://...")``."""
    connected: bool = ray.util.client.ray.is_connected()
    return connected
