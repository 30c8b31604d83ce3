"""The limits of an elastic job, and the counts that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    is_elastic: bool = field(init=False)
    """Whether the workers may change during the job."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_elastic", self.resets != 0 or self.least != self.most)
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


@dataclass(slots=True)
class ElasticCounts:
    """How often the members of a job changed, by reason."""

    failures: int = 0
    """Failures of workers that were in a world, or on their way to one; a host that was lost is one failure."""
    resizes: int = 0
    """Planned changes: newcomers, or fewer slots."""
    preemptions: int = 0
    """Hosts that left after a notice."""
