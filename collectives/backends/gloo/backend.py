"""Collectives over TCP with torch's Gloo: how its transport comes about."""

from __future__ import annotations

import numpy as np

from collectives.api import Store
from collectives.backends.gloo.connections import ADDRESS_BYTES, NOWHERE, Connections
from collectives.backends.gloo.meeting import import_torch, meet, open_device
from collectives.backends.gloo.transport import GlooTransport
from collectives.backends.group import Group
from collectives.backends.messaging import MessagingBackend

__all__ = ["GlooBackend"]


class GlooBackend(MessagingBackend):
    """A member of ``group``, whose members find each other in ``store``, under a prefix that no other group uses.

    ``timeout`` bounds the connecting, and the silence of a peer within a call, in seconds. ``interface`` is the network
    interface, or ``hostname`` the own name or address, that the peers connect to; by default the address of the host's
    name.
    """

    def __init__(
        self, group: Group, store: Store, timeout: float = 30.0, interface: str = "", hostname: str = ""
    ) -> None:
        import_torch()
        device, address = open_device(interface, hostname)
        connections = Connections(address)
        transport = GlooTransport(group, meet(group, store, timeout, device), connections)
        connections.find(_exchange_addresses(transport, address))
        super().__init__(transport)


def _exchange_addresses(transport: GlooTransport, address: bytes) -> frozenset[bytes]:
    """The addresses that the members listen on."""
    size = transport.group.size
    mine, all = np.frombuffer(address, np.uint8), np.empty(ADDRESS_BYTES * size, np.uint8)
    transport.alltoall(np.tile(mine, size), all)
    return frozenset(row.tobytes() for row in all.reshape(size, ADDRESS_BYTES)) - {NOWHERE}
