"""How the members of a hierarchical group connect: inside each host, between the hosts, and all together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import msgpack

from collectives.attempt import ConnectAttempt
from collectives.backends.base import Backend
from collectives.backends.group import Group
from collectives.backends.joining import Joining

__all__ = ["CROSS", "FLAT", "LOCAL", "Combine", "HierarchicalJoining"]

LOCAL, CROSS, FLAT = "local", "cross", "flat"

Combine: TypeAlias = Callable[[Mapping[str, Backend]], Backend]
"""Makes the hierarchical backend of its parts, which it owns then."""


class HierarchicalJoining(Joining):
    """See :class:`Joining`. ``parts`` has LOCAL and FLAT, and CROSS for a member that is in a column."""

    def __init__(self, group: Group, parts: Mapping[str, Joining], combine: Combine) -> None:
        super().__init__(group, msgpack.packb({name: part.offer for name, part in parts.items()}))
        self._parts = parts
        self._combine = combine

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> Backend:
        """See :class:`Joining`."""
        found = [msgpack.unpackb(offer) for offer in offers]
        backends: dict[str, Backend] = {}
        try:
            for name, part in self._parts.items():
                positions = [self.group.ranks.index(rank) for rank in part.group.ranks]
                backends[name] = part.connect([found[position][name] for position in positions], attempt)
        except BaseException as error:
            for backend in backends.values():
                backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
                backend.close()
            raise
        return self._combine(backends)

    def close(self) -> None:
        """See :class:`Joining`."""
        for part in self._parts.values():
            part.close()
