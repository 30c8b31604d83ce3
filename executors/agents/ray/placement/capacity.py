"""Pure: the nodes of a cluster -> how many workers of a job each may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


def check_labels(selector: object, argument: str) -> None:
    """Raise ValueError unless ``selector`` is a label selector, or None."""
    given = {} if selector is None else selector
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
        raise ValueError(
            f"{argument} is {selector!r}, but must be a dict of labels and their values, such as "
            '{"ray.io/market-type": "!spot"}'
        )


def matches(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether ``labels`` match Ray's label selector, whose values are "a", "!a", "in(a, b)" or "!in(a, b)"."""
    return all(_match(labels.get(key), text) for key, text in selector.items())


def _match(value: str | None, text: str) -> bool:
    positive = text.removeprefix("!").strip()
    is_list = positive.startswith("in(") and positive.endswith(")")
    allowed = positive[3:-1].split(",") if is_list else [positive]
    return (value in [each.strip() for each in allowed]) != text.startswith("!")


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
    free = {name: fits(need, node.free) for name, node in cluster.nodes.items()}
    total = {name: fits(need, node.total) for name, node in cluster.nodes.items()}
    return count_slots(free, total, shares, before)


def count_slots(
    free: Mapping[str, int], total: Mapping[str, int], shares: Mapping[str, Share], before: Mapping[str, int]
) -> dict[str, int]:
    """As :func:`slots`, by the workers that fit into what is ``free`` on each node, and into its ``total``."""
    found: dict[str, int] = {}
    for name, count in free.items():
        share = shares.get(name, NONE)
        has = share.workers + count if share.settled else before.get(name, share.workers + count)
        found[name] = min(has, total[name])
    return {name: count for name, count in found.items() if count}


@dataclass(frozen=True, slots=True)
class JobDemand:
    """A job wants so many ``workers``, each with ``need``, on nodes with ``labels``; so many run on each node."""

    workers: int
    need: Resources
    labels: Mapping[str, str]
    running: Mapping[str, int]


def total_demand(demands: Sequence[JobDemand], cluster: Cluster) -> list[tuple[dict[str, float], dict[str, str]]]:
    """What a cluster must have room for: each bundle with the labels of its node.

    These are the workers of all ``demands``, running or not, and the resources of their kinds that others hold on each
    node.
    """
    wanted = [(dict(demand.need), dict(demand.labels)) for demand in demands for _ in range(demand.workers)]
    return [*wanted, *((bundle, {}) for bundle in _others(demands, cluster))]


def _others(demands: Sequence[JobDemand], cluster: Cluster) -> list[dict[str, float]]:
    kinds = sorted({name for demand in demands for name in demand.need})
    used = []
    for name, node in cluster.nodes.items():
        own = [(demand.running.get(name, 0), demand.need) for demand in demands]
        taken = {
            kind: node.total.get(kind, 0.0)
            - node.free.get(kind, 0.0)
            - sum(count * need.get(kind, 0.0) for count, need in own)
            for kind in kinds
        }
        used.append({kind: amount for kind, amount in taken.items() if amount > TOLERANCE})
    return [bundle for bundle in used if bundle]
