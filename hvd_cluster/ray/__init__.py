"""Distributed training on a Ray cluster.

::

    settings = RayExecutor.create_settings(timeout_s=30)
    with RayExecutor(settings, num_workers=4) as executor:
        losses = executor.run(train)

With ``min_workers`` the workers may change while the training runs. ``HvdTrainer`` is for Ray Train.
"""

import importlib
from typing import TYPE_CHECKING, Any

from executors.agents.ray import get_dataset_shard
from hvd_cluster.ray.base_worker import BaseHorovodWorker
from hvd_cluster.ray.elastic import ElasticRayExecutor, ElasticSettings, RayHostDiscovery
from hvd_cluster.ray.executor import MiniSettings, RayExecutor
from hvd_cluster.ray.ray_logger import log

if TYPE_CHECKING:
    from hvd_cluster.ray.trainer import HvdTrainer as HvdTrainer

# Without HvdTrainer: a star import must not need what Ray Train needs.
__all__ = [
    "BaseHorovodWorker",
    "ElasticRayExecutor",
    "ElasticSettings",
    "MiniSettings",
    "RayExecutor",
    "RayHostDiscovery",
    "get_dataset_shard",
    "log",
]


def __getattr__(name: str) -> Any:
    """Ray Train is imported when it is asked for: that takes seconds, and pandas and PyArrow."""
    if name == "HvdTrainer":
        return importlib.import_module("hvd_cluster.ray.trainer").HvdTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
