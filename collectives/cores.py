"""The cores that a process may use, how ranks share them, and how a thread is bound to one.

The scheduler leaves them together for seconds where it takes no halted core for idle, as in virtual machines: each
wait of one for another then costs several changes of context instead of none.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from collectives.api import Topology

logger = logging.getLogger(__name__)


CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
SCHEDULE = Path("/proc/self/schedstat")
"""Of the main thread, whichever thread reads it: nanoseconds on a core, nanoseconds in a run queue, time slices."""


@dataclass(frozen=True, slots=True)
class Cores:
    """``count`` cores, shared by ``ranks`` ranks."""

    count: int
    ranks: int

    @classmethod
    def of(cls, topology: Topology) -> Cores:
        """Those of the host of ``topology``."""
        return cls(topology.cores, topology.local_size)

    @property
    def are_crowded(self) -> bool:
        """Whether there are more ranks than cores: a spinning rank may occupy the core of the rank it waits for."""
        return self.count < self.ranks

    @property
    def are_scarce(self) -> bool:
        """Whether some rank has no second core for its communication thread while it computes."""
        return self.count < 2 * self.ranks


def usable_cores() -> int:
    """The cores that this process may use: those of its affinity, or fewer where its control group has a quota."""
    return min(len(os.sched_getaffinity(0)), _quota())


def usable_numbers() -> tuple[int, ...]:
    """The numbers of as many cores as this process may use; ranks with one affinity and one quota have the same."""
    return tuple(sorted(os.sched_getaffinity(0))[: _quota()])


def queued_seconds() -> float:
    """How long the main thread of this process could have run but had no core, so far; 0 where nothing tells."""
    return queued_seconds_of(SCHEDULE)


def queued_seconds_of(schedule: Path) -> float:
    """The same, from the file ``schedule``."""
    fields = _read(schedule).split()
    return int(fields[1]) / 1e9 if len(fields) > 1 and fields[1].isdigit() else 0.0


@functools.cache
def _quota() -> int:
    """The quota of this process, which is read once, in whole cores."""
    return quota_of(CGROUPS, MEMBERSHIP)


def quota_of(root: Path, membership: Path) -> int:
    """The smallest quota of the control groups in ``membership``, and of those around them, in whole cores.

    ``root`` is where both versions of control groups are mounted.
    """
    entries = [*_read(membership).splitlines(), "0::/"]
    least = min([limit for entry in entries for limit in _limits(root, entry)])
    return max(1, math.ceil(least)) if math.isfinite(least) else sys.maxsize


def _limits(root: Path, entry: str) -> Iterator[float]:
    """The quotas of the group ``entry``, such as ``0::/job`` or, in version 1, ``4:cpu,cpuacct:/job``."""
    _, controllers, path = entry.split(":", 2)
    group = PurePosixPath(path).relative_to("/")
    for around in (group, *group.parents):
        if not controllers:
            yield _ratio(_read(root / around / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", controllers):
                times = [_read(root / mount / around / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
                yield _ratio(" ".join(times))


def _ratio(limit: str) -> float:
    """The cores that ``limit`` allows: microseconds of CPU time and of a period; infinite for anything else."""
    quota, _, period = limit.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else math.inf


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # there is no control group, or no quota
        return ""
