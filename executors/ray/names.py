"""Readable names of Ray nodes. Pure: an id is long, and nodes may share host name and address."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["Names", "Place"]

logger = logging.getLogger(__name__)

SHOWN = 8


@dataclass(frozen=True, slots=True)
class Place:
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

    def __init__(self, places: Callable[[], list[Place]]) -> None:
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
