"""Settings -> a running engine."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from collectives.api import SettingsError, Store, Topology
from collectives.backends import table
from collectives.backends.base import Backend
from collectives.control.base import Channel
from collectives.control.configuration import brief
from collectives.control.handshake import Hello, connect_channel
from collectives.control.inproc import InprocHub
from collectives.engine import Engine
from collectives.interfaces import address_of
from collectives.process_sets import ProcessSets
from collectives.rendezvous.client import RendezvousClient
from collectives.rendezvous.store import MemoryStore, PrefixStore
from collectives.settings import Settings

__all__ = ["start"]


def start(settings: Settings, process_sets: Sequence[Sequence[int]] = (), generation: int = 0) -> Engine:
    """Find the other ranks and start the engine of this one.

    All ranks call this with the same ``process_sets`` and ``generation``, which counts the starts in one process, so
    that a new start does not meet what an old one left at the rendezvous. Raises SettingsError, InvalidRequestError
    for the process sets, CollectiveTimeoutError or PeerLostError when ranks do not come.
    """
    sets = ProcessSets(settings.size, process_sets)
    if settings.rendezvous_address is None:
        return _start_alone(settings, sets)
    client = RendezvousClient(
        settings.rendezvous_address, settings.rendezvous_port, settings.secret, settings.timeouts.connect
    )
    try:
        return _start_together(settings, sets, PrefixStore(client, f"{settings.rendezvous_scope}/{generation}"))
    finally:
        client.close()


def _start_alone(settings: Settings, sets: ProcessSets) -> Engine:
    topology = Topology(hosts=(settings.hostname,))
    channel = InprocHub(1).channel(0)
    return _assemble(settings, sets, topology, channel, MemoryStore(), "127.0.0.1")


def _start_together(settings: Settings, sets: ProcessSets, store: Store) -> Engine:
    hello = Hello(settings.rank, settings.size, settings.hostname, configuration=_configuration(settings, sets))
    address = _own_address(settings)
    meeting = connect_channel(hello, store, settings.secret, address, settings.timeouts, sets)
    topology = Topology(
        settings.rank,
        settings.size,
        settings.local_rank,
        settings.local_size,
        settings.cross_rank,
        settings.cross_size,
        meeting.hosts,
    )
    try:
        return _assemble(settings, sets, topology, meeting.channel, store, address)
    except BaseException:
        meeting.channel.close()
        raise


def _configuration(settings: Settings, sets: ProcessSets) -> dict[str, str]:
    """What all ranks must have in common."""
    return {
        "HOROVOD_CPU_OPERATIONS": settings.cpu_operations,
        "HOROVOD_CACHE_CAPACITY": "above 0" if settings.cache_capacity else "0",
        "the list of process sets": brief(str([list(sets.ranks(id)) for id in sets.ids()[1:]])),
    }


def _assemble(
    settings: Settings, sets: ProcessSets, topology: Topology, channel: Channel, store: Store, address: str
) -> Engine:
    backends: dict[int, Backend] = {}
    try:
        for id in sets.ids():
            members = sets.ranks(id)
            if topology.rank in members:
                name = table.choose(members, topology, settings.cpu_operations)
                group = PrefixStore(store, f"set-{id}/{name}")
                backends[id] = table.connect(name, members.index(topology.rank), len(members), group, settings, address)
        return Engine(topology, settings, sets, channel, backends)
    except BaseException as error:
        for backend in backends.values():
            backend.abort(error if isinstance(error, Exception) else RuntimeError(str(error)))
            backend.close()
        raise


def _own_address(settings: Settings) -> str:
    """The address of the interface that was named, or of the one that leads to the rendezvous, for the other ranks."""
    if settings.interface:
        return address_of(settings.interface)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((settings.rendezvous_address, settings.rendezvous_port or 1))
        except OSError as error:
            raise SettingsError(
                f"HOROVOD_GLOO_RENDEZVOUS_ADDR is {settings.rendezvous_address!r}; this host cannot reach it: {error}"
            ) from error
        return str(probe.getsockname()[0])
