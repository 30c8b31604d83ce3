"""The present state of the nodes of the cluster, from Ray."""

from __future__ import annotations

from typing import Any

import ray

from executors.ray.capacity import Cluster, Node
from executors.ray.names import Place

__all__ = ["cluster_now", "deadlines", "death_of", "places_now"]

MILLISECONDS = 1000


def cluster_now() -> Cluster:
    """The nodes that take new work: those that drain are left out, such as one that will be preempted."""
    found = ray.nodes()
    # Ray has no public function for these two.
    state = ray._private.state
    draining = state.state.get_draining_nodes()
    free = state.available_resources_per_node()
    nodes = {each["NodeID"]: each for each in found if each["Alive"] and each["NodeID"] not in draining}
    return Cluster({name: _node(each, free.get(name, each["Resources"])) for name, each in nodes.items()})


def places_now() -> list[Place]:
    """All live nodes, also those that drain."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    return [Place(each["NodeID"], each["NodeManagerHostname"], each["NodeManagerAddress"]) for each in alive]


def death_of(node: str) -> str | None:
    """Why ``node`` is dead; None if Ray does not say that it is."""
    return next((_reason(each) for each in ray.nodes() if each["NodeID"] == node and not each["Alive"]), None)


def deadlines() -> dict[str, float]:
    """When each node that drains will be gone, in seconds since 1970; without those of which Ray does not know that."""
    known = ray._private.state.state.get_draining_nodes()  # milliseconds, 0 for none
    return {node: milliseconds / MILLISECONDS for node, milliseconds in known.items() if milliseconds}


def _node(entry: dict[str, Any], free: dict[str, float]) -> Node:
    return Node(entry["Resources"], free, entry.get("Labels") or {})


def _reason(entry: dict[str, Any]) -> str:
    return f"its Ray node has died ({entry.get('DeathReasonMessage') or 'no reason is known'})"
