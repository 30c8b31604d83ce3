"""The present state of the nodes of the cluster, from Ray."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from executors.ray.capacity import Cluster, Node
from executors.ray.names import Place

__all__ = ["cluster_now", "deadlines", "death_of", "is_placed", "places_now", "quiet_seconds"]

logger = logging.getLogger(__name__)

MILLISECONDS = 1000
ANSWER_S = 5.0


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


def quiet_seconds() -> float:
    """How long ago the last live node joined, by its own clock; 0 where Ray does not tell."""
    try:
        # Ray has no public function for this without its dashboard.
        process: Any = ray._private.worker.global_worker
        known = process.gcs_client.get_all_node_info(timeout=ANSWER_S).values()
        last: int = max(each.start_time_ms for each in known if not each.end_time_ms)
    except Exception as error:  # noqa: BLE001  a job must not fail because of an unknown report
        logger.debug("Ray does not tell when its nodes joined: %r", error)
        return 0.0
    return max(0.0, time.time() - last / MILLISECONDS)


def deadlines() -> dict[str, float]:
    """When each node that drains will be gone, in seconds since 1970; without those of which Ray does not know that."""
    known = ray._private.state.state.get_draining_nodes()  # milliseconds, 0 for none
    return {node: milliseconds / MILLISECONDS for node, milliseconds in known.items() if milliseconds}


def is_placed(actor: Any) -> bool:
    """Whether Ray has found a process for ``actor``; true where Ray does not tell."""
    try:
        # Ray has no public function for this without its dashboard.
        table: dict[str, Any] = ray._private.state.state.actor_table(actor._actor_id.hex())
        return table.get("State") != "PENDING_CREATION" or bool(table.get("Pid", True))
    except Exception as error:  # noqa: BLE001  a job must not fail because of an unknown report
        logger.debug("Ray does not tell whether an actor was placed: %r", error)
        return True


def _node(entry: dict[str, Any], free: dict[str, float]) -> Node:
    return Node(entry["Resources"], free, entry.get("Labels") or {})


def _reason(entry: dict[str, Any]) -> str:
    return f"its Ray node has died ({entry.get('DeathReasonMessage') or 'no reason is known'})"
