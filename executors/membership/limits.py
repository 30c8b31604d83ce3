"""The limits of an elastic job, and the counts that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass

from executors.api import counted
from executors.membership.hosts import Cooldown

UNLIMITED = 1 << 20
"""More workers than any job has."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How many workers a job has, and how often it may change.

    ``size`` workers start; at least ``least`` of them must be there for the job to go on, and at most ``most`` ever
    run. ``resets`` bounds failures and resizes together, ``failures`` and ``resizes`` each of them; None is no bound.
    ``timeout``: how long the job waits for hosts and workers where there are too few, in seconds. ``cooldown``: None
    keeps a host blacklisted for ever. ``may_find_hosts``: whether other hosts may still be found, so that a job without
    a usable one waits. Raises ValueError unless 1 <= least <= size <= most, and the others are >= 0.
    """

    size: int
    least: int
    most: int
    resets: int | None = None
    failures: int | None = None
    resizes: int | None = None
    timeout: float = 600.0
    cooldown: Cooldown | None = None
    may_find_hosts: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.size <= self.most:
            raise ValueError(
                f"a job cannot start with {self.size} workers, have {self.least} at least and {self.most} at most: "
                "give 1 <= least number <= number <= largest number"
            )
        for name in ("resets", "failures", "resizes"):
            bound = getattr(self, name)
            if bound is not None and bound < 0:
                raise ValueError(f"the limit of {name} is {bound}: give 0 or more, or None for no limit")
        if self.timeout < 0:
            raise ValueError(f"the elastic timeout is {self.timeout:g} s: give 0 or more seconds")

    @classmethod
    def static(cls, size: int) -> Limits:
        """Those of a job of ``size`` workers that ends with its first failure."""
        return cls(size, size, size, resets=0, may_find_hosts=False)

    @property
    def is_bounded(self) -> bool:
        """Whether the user gave a largest number; otherwise the job takes all slots."""
        return self.most < UNLIMITED

    @property
    def is_elastic(self) -> bool:
        """Whether the workers may change during the job."""
        return self.resets != 0 or self.least != self.most


@dataclass(slots=True)
class ElasticCounts:
    """How often the members of a job changed, by reason."""

    failures: int = 0
    """Failures of workers that were in a world, or on their way to one; a host that was lost is one failure."""
    resizes: int = 0
    """Planned changes: newcomers, or fewer slots."""
    preemptions: int = 0
    """Hosts that left after a notice."""

    def excess(self, limits: Limits) -> str | None:
        """Which limit is exceeded, as a sentence; None if none is."""
        resets = self.failures + self.resizes
        for count, limit, name in (
            (resets, limits.resets, "resets"),
            (self.failures, limits.failures, "failures"),
            (self.resizes, limits.resizes, "resizes"),
        ):
            if limit is not None and count > limit:
                return (
                    f"the number of {name} exceeded its limit of {limit} ({counted(self.failures, 'failure')}, "
                    f"{counted(self.resizes, 'resize')}); raise the limit, or look for the cause of the failures"
                )
        return None

    def allow_resize(self, limits: Limits) -> bool:
        """Whether one more resize stays within the limits."""
        return ElasticCounts(self.failures, self.resizes + 1).excess(limits) is None
