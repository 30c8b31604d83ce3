"""The cores that a process may use, how ranks share them, and how a thread is bound to one.

The scheduler leaves them together for seconds where it takes no halted core for idle, as in virtual machines: each
wait of one for another then costs several changes of context instead of none.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from collectives.api import Topology

logger = logging.getLogger(__name__)


CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


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


current_core = ctypes.PyDLL(None).sched_getcpu  # sched_getcpu(3); -1, the core of no rank, if unknown

MOVE_SECONDS = 0.001
"""The shortest time between two moves of a rank: a move takes 5 µs."""
FRESH_SECONDS = 0.002
"""How soon after one wait the next must come for the cores that were noted at the first to be still true."""


class Placement:
    """Moves the calling thread of one rank. A thread that is bound to one core stays there."""

    def __init__(self) -> None:
        self._next_move = 0.0
        self._shared = -1, 0.0
        """The last wait at which this rank shared its core, and when that was noticed."""

    def improve(self, here: int, others: Sequence[int], wait: int) -> bool:
        """Move from core ``here`` to a better one, if there is one; ``others`` are the cores of the other ranks.

        Called in a ``wait`` for other ranks, by its number, while this rank shares its core. It moves in the second of
        two such waits in quick succession, because a rank that computes may have left the core that it was last seen
        on. The thread may run on the same cores as before afterwards: it is moved, not bound.
        """
        now = time.monotonic()
        before, noticed = self._shared
        if wait == before:
            return False
        self._shared = wait, now
        if now - noticed > FRESH_SECONDS or now < self._next_move:
            return False
        allowed = os.sched_getaffinity(0)
        core = better_core(here, others, allowed)
        if core is None:
            return False
        self._next_move = now + MOVE_SECONDS
        with suppress(OSError):  # the system took the core away in this moment
            os.sched_setaffinity(0, {core})
            os.sched_setaffinity(0, allowed)
        return True


def better_core(here: int, others: Sequence[int], allowed: Collection[int]) -> int | None:
    """The next core after ``here`` of those with the fewest of the ``others``; None if ``here`` is as good."""
    if here not in allowed:
        return None
    ranks = Counter(others)
    after = max(allowed) + 1
    core = min(allowed, key=lambda core: (ranks[core], (core - here) % after))
    return core if ranks[core] < ranks[here] else None


def pin(core: int) -> None:
    """Let the calling thread, and the threads it starts, run on ``core`` only. A warning where the system refuses."""
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        logger.warning("cannot bind the thread to core %d: %s; it runs where the system puts it", core, error.strerror)
