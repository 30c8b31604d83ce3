"""Whether the ranks of a host have enough cores."""

from __future__ import annotations

from dataclasses import dataclass

from collectives.api import Topology

__all__ = ["Cores"]


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
