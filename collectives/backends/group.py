"""The ranks that do collectives together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from collectives.api import Topology

__all__ = ["Group"]


@dataclass(frozen=True, slots=True)
class Group:
    """A list of ranks, as one of them sees it.

    ``ranks`` are the global ranks of the members; a member's index in it is its *position*, and ``position`` is that
    of this process. ``hosts[i]`` is the host of the member at position i. ``size`` is the number of members. Backends
    compute with positions; messages to users name global ranks and hosts, see :meth:`describe`.
    """

    ranks: tuple[int, ...]
    position: int
    hosts: tuple[str, ...]
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))

    @classmethod
    def of(cls, members: Sequence[int], topology: Topology) -> Group:
        """The group of the global ranks ``members``, which include the rank of this process."""
        ranks = tuple(members)
        return cls(ranks, ranks.index(topology.rank), tuple(topology.hosts[rank] for rank in ranks))

    @property
    def others(self) -> list[int]:
        """The positions of the other members."""
        return [position for position in range(self.size) if position != self.position]

    def ranks_at(self, positions: Iterable[int]) -> list[int]:
        """The global ranks of the members at ``positions``."""
        return [self.ranks[position] for position in positions]

    def some_others(self) -> str:
        """The other members, for a message about one of them that is not known."""
        return ("" if self.size < 3 else "at least one of ") + self.describe(self.others)

    def part(self, positions: Sequence[int]) -> Group:
        """The group of the members at ``positions``, which include that of this process."""
        ranks = tuple(self.ranks_at(positions))
        hosts = tuple(self.hosts[position] for position in positions)
        return Group(ranks, tuple(positions).index(self.position), hosts)

    def by_host(self) -> list[list[int]]:
        """The positions on each host; the hosts in the order of their first members."""
        found: dict[str, list[int]] = {}
        for position, host in enumerate(self.hosts):
            found.setdefault(host, []).append(position)
        return list(found.values())

    def describe(self, positions: Iterable[int]) -> str:
        """The members at ``positions`` for a message: "rank 3 on host 'b'", "ranks 0, 1 on host 'a' and ..."."""
        hosts: dict[str, list[int]] = {}
        for position in positions:
            hosts.setdefault(self.hosts[position], []).append(self.ranks[position])
        return " and ".join(f"{_name(ranks)} on host {host!r}" for host, ranks in hosts.items())


def _name(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
