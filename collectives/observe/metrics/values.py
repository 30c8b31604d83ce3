"""The metrics of a rank, as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from collectives.engine.counters import SetCounts
from collectives.stalls.stragglers import Straggler


@dataclass(frozen=True, slots=True)
class Metrics:
    """The work of this process, since its first ``init()`` and over all worlds of an elastic job.

    ``rank``, ``size`` and ``round`` are those of the present world, or the last one. ``rounds`` counts the worlds in
    which this process has been, and ``lost_steps`` the commits that the ranks had to repeat after a loss.
    ``process_sets`` has the work for each process set, by its id; 0 is that of all ranks. ``messages_sent`` and
    ``messages_received`` are control messages to and from other ranks. ``stragglers``, on rank 0, are the ranks that
    the others wait for now. ``samples`` are those that the script has counted, see :func:`hvd_cluster.count_samples`,
    and ``steps`` the calls of ``step()`` of a ``DistributedOptimizer``. ``batch`` is the number of the last batch that
    has ended on this rank in the present world, None if there was none; the log and the timeline show the same number.
    ``waiting`` is how long callers have waited since that batch, in seconds, 0 if none does: the counts of
    ``process_sets`` get a wait when it is over.
    """

    rank: int
    size: int
    round: int
    rounds: int
    lost_steps: int
    messages_sent: int
    messages_received: int
    process_sets: Mapping[int, SetCounts] = field(default_factory=dict)
    stragglers: tuple[Straggler, ...] = ()
    samples: int = 0
    steps: int = 0
    batch: int | None = None
    waiting: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Everything as numbers, text, lists and dicts, for JSON; the ids of process sets become text."""
        own = {name: getattr(self, name) for name in _NUMBERS}
        sets = {str(id): counts.as_dict() for id, counts in self.process_sets.items()}
        stragglers = [straggler.as_dict() for straggler in self.stragglers]
        return {**own, "process_sets": sets, "stragglers": stragglers}


_NUMBERS = (
    "rank",
    "size",
    "round",
    "rounds",
    "lost_steps",
    "messages_sent",
    "messages_received",
    "samples",
    "steps",
    "batch",
    "waiting",
)
