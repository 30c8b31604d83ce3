"""What Ray says of the nodes of the cluster: which there are, which drain, and when a preempted one will be gone.

And readable names for nodes, and for the ends of their actors.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from executors.agents.ray.placement.capacity import Cluster, Node

logger = logging.getLogger(__name__)


SHOWN = 8


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node: its id, host name and address."""

    node: str
    hostname: str
    address: str

    @property
    def name(self) -> str:
        """A short name that no other node has: the ids of test clusters differ at the end only."""
        return f"{self.hostname}-{self.node[-SHOWN:]}"


class Names:
    """Translates between what a discovery calls a node, and the names of hosts in a job."""

    def __init__(self, places: Callable[[], list[NodePlace]]) -> None:
        self._places = places
        self._nodes: dict[str, str] = {}
        self._unknown: set[str] = set()

    def node(self, name: str) -> str:
        """The id of the node with ``name``, which :meth:`slots` has returned before."""
        return self._nodes[name]

    def name(self, node: str) -> str | None:
        """The name of ``node``, if :meth:`slots` has returned it before."""
        return next((name for name, other in self._nodes.items() if other == node), None)

    def slots(self, found: Mapping[str, int]) -> dict[str, int]:
        """``found`` by names. It may have ids, and host names or addresses of one node; others are left out."""
        places = self._places()
        named: dict[str, int] = {}
        for host, count in found.items():
            matching = [place for place in places if host in (place.node, place.hostname, place.address)]
            if len(matching) == 1:
                self._nodes[matching[0].name] = matching[0].node
                named[matching[0].name] = count
            elif host not in self._unknown:
                self._unknown.add(host)
                what = "several live nodes" if matching else "no live node"
                logger.warning("host %s is not used: it is the id, host name or address of %s", host, what)
        return named


MILLISECONDS = 1000
ANSWER_S = 5.0
# The clocks of two hosts may differ by this much.
SKEW_S = 30.0


def cluster_now() -> Cluster:
    """The nodes that take new work: those that drain are left out, such as one that will be preempted."""
    found = ray.nodes()
    # Ray has no public function for these two.
    state = ray._private.state
    draining = state.state.get_draining_nodes()
    free = state.available_resources_per_node()
    nodes = {each["NodeID"]: each for each in found if each["Alive"] and each["NodeID"] not in draining}
    return Cluster({name: _node(each, free.get(name, each["Resources"])) for name, each in nodes.items()})


def places_now() -> list[NodePlace]:
    """All live nodes, also those that drain."""
    alive = [each for each in ray.nodes() if each["Alive"]]
    return [NodePlace(each["NodeID"], each["NodeManagerHostname"], each["NodeManagerAddress"]) for each in alive]


def death_of(node: str) -> str | None:
    """Why ``node`` is dead; None if Ray does not say that it is."""
    return next((_reason(each) for each in ray.nodes() if each["NodeID"] == node and not each["Alive"]), None)


def quiet_seconds() -> float:
    """For how long at least no node has joined; 0 where Ray does not tell.

    A node tells when it joined by its own clock, which may be SKEW_S seconds away from the clock of this process.
    """
    try:
        # Ray has no public function for this without its dashboard.
        process: Any = ray._private.worker.global_worker
        known = process.gcs_client.get_all_node_info(timeout=ANSWER_S).values()
        last: int = max(each.start_time_ms for each in known if not each.end_time_ms)
    except Exception as error:  # noqa: BLE001  a job must not fail because of an unknown report
        logger.debug("Ray does not tell when its nodes joined: %r", error)
        return 0.0
    return max(0.0, time.time() - last / MILLISECONDS - SKEW_S)


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


# Ray's explanation begins after the facts about the actor, each in a line "<tab>name: value".
DETAIL = re.compile(r"Worker exit detail: (.+?)(?:\. |\.?$)", re.MULTILINE)
FACT = re.compile(r"^\t\w+: ")
UNREACHABLE = re.compile(r"^The actor \S+ is unavailable: (.+?)\. The task may or may not", re.DOTALL)
LONGEST = 300


def how(error: BaseException) -> str:
    """The end of an actor from the ``error`` that Ray raises for its calls: it died, or cannot be reached."""
    unreachable = UNREACHABLE.match(str(error))
    if unreachable:
        return f"cannot be reached: {' '.join(unreachable[1].split())[:LONGEST]}"
    lines = [line for line in str(error).splitlines() if line and not FACT.match(line)]
    text = " ".join(line.strip() for line in lines[1:] or lines)
    detail = DETAIL.search(str(error))
    return f"died: {(detail[1] if detail else text)[:LONGEST]}"


class Departures:
    """``deadlines`` has the time at which each node will be gone, where that is known, in seconds of ``clock``.

    Ray may tell it later than that the node drains, and a second notice replaces the first one.
    """

    def __init__(
        self, deadlines: Callable[[], Mapping[str, float]] = deadlines, clock: Callable[[], float] = time.time
    ) -> None:
        self._deadlines = deadlines
        self._clock = clock
        self._told: Mapping[str, float] = {}

    def news(self) -> dict[str, float]:
        """The seconds until each node will be gone whose time has become known, or has changed, since the last call."""
        told, self._told = self._told, dict(self._deadlines())
        now = self._clock()
        return {node: max(0.0, at - now) for node, at in self._told.items() if told.get(node) != at}
