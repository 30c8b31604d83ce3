"""The questions of ``init()`` to the launcher that started this process."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from collectives.api import SettingsError, Topology
from collectives.cores import usable_cores
from executors.arguments import parse_seconds
from executors.environments.table import place_of
from executors.meetings.farewell import Farewell
from executors.meetings.joining import Joined, join
from executors.meetings.mark import erase_mark, leave_mark, refuse_child
from executors.threads import thread_remark, threads_of

__all__ = ["Launcher", "register_thread_count", "warn_of_threads"]

logger = logging.getLogger(__name__)

START_TIMEOUT = "HOROVOD_START_TIMEOUT"
# Batch systems start the hosts of a job minutes apart.
START_TIMEOUT_SECONDS = 300.0

_thread_counts: dict[str, Callable[[], int]] = {}


def register_thread_count(framework: str, count: Callable[[], int]) -> None:
    """Let ``count()`` return the threads that ``framework`` computes with: the user may have set them by a call."""
    _thread_counts[framework] = count


class Launcher:
    """The launcher that started this process, where it is none of ours.

    ``join`` finds the other ranks once, for all calls of ``init()``. In rank 0, the rendezvous server of the job runs
    until :meth:`close`, and so does what it serves after a meeting that failed.
    """

    def __init__(self) -> None:
        self._joined: Joined | None = None
        self._farewell = Farewell()

    def join(self, environment: Mapping[str, str]) -> dict[str, str]:
        """``environment`` with the variables of a rank; as it is, where no other launcher started several processes.

        Raises what :func:`executors.meetings.joining.join` raises, and SettingsError in a child process of a rank.
        """
        place = place_of(environment)
        if place is None:
            return dict(environment)
        if self._joined is None:
            refuse_child(environment, place)
            self._joined = join(place, _start_timeout(environment), self._farewell)
            leave_mark(os.environ, place)
        return {**environment, **self._joined.environment}

    def close(self) -> None:
        """End what runs for the job in this process."""
        self._farewell.end()
        joined, self._joined = self._joined, None
        if joined is not None:
            erase_mark(os.environ)
            joined.close()

    def forget(self) -> None:
        """In a forked child: all of it is the parent's. Takes no lock."""
        self._farewell.disown()
        joined, self._joined = self._joined, None
        if joined is not None:
            joined.disown()


def _start_timeout(environment: Mapping[str, str]) -> float:
    given = environment.get(START_TIMEOUT, "").strip()
    try:
        return parse_seconds(given, START_TIMEOUT) if given else START_TIMEOUT_SECONDS
    except ValueError as error:
        raise SettingsError(str(error)) from None


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
