"""What ``init()`` asks of the launcher that started this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from collectives.api import Topology
from collectives.cores import usable_cores
from collectives.settings import Settings
from executors.environments.table import place_of
from executors.meetings.joining import Joined, join
from executors.threads import thread_remark, threads_of

__all__ = ["Launcher", "register_thread_count", "warn_of_threads"]

logger = logging.getLogger(__name__)

_thread_counts: dict[str, Callable[[], int]] = {}


def register_thread_count(framework: str, count: Callable[[], int]) -> None:
    """Let ``count()`` return the threads that ``framework`` computes with: the user may have set them by a call."""
    _thread_counts[framework] = count


class Launcher:
    """The launcher that started this process, where it is none of ours.

    ``join`` finds the other ranks once, for all calls of ``init()``. In rank 0, the rendezvous server of the job runs
    until :meth:`close`.
    """

    def __init__(self) -> None:
        self._joined: Joined | None = None

    def join(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` with the variables of a rank; as it is, where no other launcher started several processes.

        Raises what :func:`executors.meetings.joining.join` raises.
        """
        place = place_of(environment)
        if place is None:
            return dict(environment)
        if self._joined is None:
            self._joined = join(place, Settings.from_environment(environment, Topology()).timeouts.connect)
        return {**environment, **self._joined.environment}

    def close(self) -> None:
        """End what runs for the job in this process."""
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.close()

    def forget(self) -> None:
        """In a forked child: all of it is the parent's."""
        self._joined = None


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
