"""What a function that :func:`hvd_cluster.spark.run` runs asks about its place."""

from __future__ import annotations

import os

from executors.spark.plan import DEVICES

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """The addresses of the GPUs that Spark assigned to this rank; none outside of a worker.

    They are what Spark calls them. The worker sees the GPUs of all ranks of its host, in the order of these, so that
    its own first one is always the device number ``local_rank()``.
    """
    return [address for address in os.environ.get(DEVICES, "").split(",") if address]
