"""Pure: the nodes of a cluster -> how many workers of a job each may have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from executors.ray.labels import matches

__all__ = ["Cluster", "Node", "Share", "fits", "others", "slots"]

Resources = Mapping[str, float]

# Ray counts resources in ten-thousandths.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Node:
    """The resources of a node, in all and free now, and its labels."""

    total: Resources
    free: Resources
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes that take new work, by id."""

    nodes: Mapping[str, Node] = field(default_factory=dict)

    def with_labels(self, selector: Mapping[str, str]) -> Cluster:
        """The nodes whose labels match all of ``selector``."""
        return Cluster({name: node for name, node in self.nodes.items() if matches(node.labels, selector)})


@dataclass(frozen=True, slots=True)
class Share:
    """The workers of the job on a node. Ray tells late what they took or freed: then it is not ``settled``."""

    workers: int = 0
    settled: bool = True


NONE = Share()


def fits(need: Resources, room: Resources) -> int:
    """How many workers, each of which needs ``need``, ``room`` has space for."""
    return max(0, min(int((room.get(name, 0.0) + TOLERANCE) // amount) for name, amount in need.items() if amount))


def slots(cluster: Cluster, need: Resources, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
    """The workers that each node may have: those of the job, and as many as fit what nobody uses.

    A node whose share is not settled keeps the number that it had ``before``. Nodes without a slot are left out.
    """
    found: dict[str, int] = {}
    for name, node in cluster.nodes.items():
        share = shares.get(name, NONE)
        count = share.workers + fits(need, node.free)
        if not share.settled:
            count = before.get(name, count)
        found[name] = min(count, fits(need, node.total))
    return {name: count for name, count in found.items() if count}


def others(cluster: Cluster, need: Resources, shares: Mapping[str, Share]) -> list[dict[str, float]]:
    """The resources on each node that other users hold, of the kinds that a worker needs."""
    used = []
    for name, node in cluster.nodes.items():
        own = shares.get(name, NONE).workers
        taken = {key: node.total.get(key, 0.0) - node.free.get(key, 0.0) - own * need[key] for key in need}
        used.append({key: amount for key, amount in taken.items() if amount > TOLERANCE})
    return [bundle for bundle in used if bundle]
