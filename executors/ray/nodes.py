"""The present state of the nodes of the cluster, from Ray."""

from __future__ import annotations

import time
from typing import Any

import ray

from executors.ray.capacity import Cluster, Node
from executors.ray.names import Place

__all__ = ["cluster_now", "death_of", "drain_seconds", "places_now"]


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


def drain_seconds(node: str) -> float | None:
    """The seconds after which ``node`` will be gone; None if it does not drain, or Ray does not say when."""
    deadline = ray._private.state.state.get_draining_nodes().get(node)  # milliseconds, 0 for none
    return max(0.0, deadline / MILLISECONDS - time.time()) if deadline else None


def _node(entry: dict[str, Any], free: dict[str, float]) -> Node:
    return Node(entry["Resources"], free, entry.get("Labels") or {})


def _reason(entry: dict[str, Any]) -> str:
    return f"its Ray node has died ({entry.get('DeathReasonMessage') or 'no reason is known'})"
