"""How the members of a hierarchical group connect: inside each host, between the hosts, and all together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgpack

from collectives.attempt import ConnectAttempt
from collectives.backends.group import Group
from collectives.backends.hierarchical import HierarchicalBackend
from collectives.backends.host import HostBackend
from collectives.backends.joining import Joining
from collectives.parameters import Parameters

__all__ = ["CROSS", "FLAT", "LOCAL", "HierarchicalJoining"]

LOCAL, CROSS, FLAT = "local", "cross", "flat"


class HierarchicalJoining(Joining):
    """See :class:`Joining`. ``parts`` has LOCAL and FLAT, and CROSS for a member that is in a column."""

    def __init__(self, group: Group, parts: Mapping[str, Joining], parameters: Parameters) -> None:
        super().__init__(group, msgpack.packb({name: part.offer for name, part in parts.items()}))
        self._parts = parts
        self._parameters = parameters

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> HierarchicalBackend:
        """See :class:`Joining`."""
        found = [msgpack.unpackb(offer) for offer in offers]
        backends: dict[str, HostBackend] = {}
        try:
            for name, part in self._parts.items():
                positions = [self.group.ranks.index(rank) for rank in part.group.ranks]
                backend = part.connect([found[position][name] for position in positions], attempt)
                assert isinstance(backend, HostBackend)
                backends[name] = backend
        except BaseException as error:
            for backend in backends.values():
                backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
                backend.close()
            raise
        local, cross, flat = backends[LOCAL], backends.get(CROSS), backends[FLAT]
        return HierarchicalBackend(self.group, local, cross, flat, self._parameters)

    def close(self) -> None:
        """See :class:`Joining`."""
        for part in self._parts.values():
            part.close()
