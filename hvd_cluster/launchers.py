"""What ``init()`` checks about the launcher that started this process."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from collectives.api import SettingsError, Topology
from executors.foreign import foreign_rank
from executors.threads import thread_remark, usable_cores

__all__ = ["check_launcher", "warn_of_threads"]

logger = logging.getLogger(__name__)


def check_launcher(environment: Mapping[str, str]) -> None:
    """Raise SettingsError if an unsupported launcher started this process as one of several."""
    rank = foreign_rank(environment)
    if rank is not None:
        raise SettingsError(
            f"{rank.launcher.name} started this process as one of {rank.size} ({rank.launcher.size}={rank.size}), but "
            "hvd-cluster cannot join the processes of that launcher: each would train a model of its own. Start the "
            f"script with hvdrun -np {rank.size} python train.py; on several hosts use RayExecutor or "
            "hvd_cluster.spark.run. Set HOROVOD_SIZE=1 to train separate models on purpose"
        )


def warn_of_threads(environment: Mapping[str, str], topology: Topology) -> None:
    """Warn, once on each host, if the threads of its ranks exceed the cores that they may use.

    Our launchers set the number of threads themselves.
    """
    remark = thread_remark(environment, usable_cores(), topology.local_size) if topology.local_rank == 0 else ""
    if remark:
        logger.warning(remark)
