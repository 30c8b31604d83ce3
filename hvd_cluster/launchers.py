"""The checks of ``init()`` about the launcher that started this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from collectives.api import SettingsError, Topology
from collectives.cores import usable_cores
from executors.foreign import foreign_rank
from executors.threads import thread_remark, threads_of

__all__ = ["check_launcher", "register_thread_count", "warn_of_threads"]

logger = logging.getLogger(__name__)

_thread_counts: dict[str, Callable[[], int]] = {}


def register_thread_count(framework: str, count: Callable[[], int]) -> None:
    """Let ``count()`` return the threads that ``framework`` computes with: the user may have set them by a call."""
    _thread_counts[framework] = count


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

    Our launchers set the number of threads themselves. A framework with a registered count says its own number.
    """
    if topology.local_rank:
        return
    cores = usable_cores()
    threads = max([count() for count in _thread_counts.values()], default=0) or threads_of(environment, cores)
    remark = thread_remark(threads, cores, topology.local_size)
    if remark:
        logger.warning(remark)
