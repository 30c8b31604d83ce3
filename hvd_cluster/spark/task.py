"""Information about its place for a function that :func:`hvd_cluster.spark.run` runs."""

from __future__ import annotations

import os

from executors.agents.spark import DEVICES

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark assigned to this rank; none outside of a worker.

    The addresses are Spark's. The worker sees the GPUs of all ranks of its host, in the order of the ranks, so that its
    own first GPU is always device number ``local_rank()``.
    """
    return [address for address in os.environ.get(DEVICES, "").split(",") if address]
