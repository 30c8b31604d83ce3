"""Settings -> a running engine."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from collectives.api import CollectiveTimeoutError, SettingsError, Store, Topology
from collectives.backends import table
from collectives.control.base import Channel
from collectives.control.configuration import brief
from collectives.control.handshake import Hello, connect_channel
from collectives.control.inproc import InprocHub
from collectives.engine.engine import Engine
from collectives.engine.set_backends import SetBackends
from collectives.interfaces import address_of
from collectives.planning.process_sets import ProcessSets
from collectives.rendezvous.client import RendezvousClient
from collectives.rendezvous.store import MemoryStore, PrefixStore
from collectives.settings import Settings

__all__ = ["start"]

SLICE_SECONDS = 0.2

OpenStore: TypeAlias = Callable[[], AbstractContextManager[Store]]
"""The store of the job, which is wanted at the start and whenever a process set is added."""


def start(settings: Settings, process_sets: Sequence[Sequence[int]] = (), generation: int = 0) -> Engine:
    """Find the other ranks and start the engine of this one.

    All ranks call this with the same ``process_sets`` and ``generation``, which counts the starts in one process, so
    that a new start does not meet what an old one left at the rendezvous. Raises SettingsError, InvalidRequestError
    for the process sets, CollectiveTimeoutError or PeerLostError when ranks do not come.
    """
    sets = ProcessSets(settings.size, process_sets)
    if settings.rendezvous_address is None:
        return _start_alone(settings, sets)
    open_store = _rendezvous(settings, generation)
    with open_store() as store:
        return _start_together(settings, sets, store, open_store)


def _rendezvous(settings: Settings, generation: int) -> OpenStore:
    @contextmanager
    def open_store() -> Iterator[Store]:
        address = str(settings.rendezvous_address)
        timeout = settings.timeouts.connect
        with closing(RendezvousClient(address, settings.rendezvous_port, settings.secret, timeout)) as client:
            yield PrefixStore(client, f"{settings.rendezvous_scope}/{generation}")

    return open_store


def _start_alone(settings: Settings, sets: ProcessSets) -> Engine:
    topology = Topology(hosts=(settings.hostname,), cores=len(os.sched_getaffinity(0)))
    channel = InprocHub(1).channel(0)
    store = MemoryStore()
    connect = _Connector(settings, topology, lambda: nullcontext(store), "127.0.0.1")
    return _assemble(settings, sets, topology, channel, connect, store)


def _start_together(settings: Settings, sets: ProcessSets, store: Store, open_store: OpenStore) -> Engine:
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
        meeting.cores,
    )
    connect = _Connector(settings, topology, open_store, address)
    try:
        return _assemble(settings, sets, topology, meeting.channel, connect, store)
    except BaseException:
        meeting.channel.close()
        raise


def _configuration(settings: Settings, sets: ProcessSets) -> dict[str, str]:
    """What all ranks must have in common."""
    return {
        "HOROVOD_CPU_OPERATIONS": settings.cpu_operations,
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(settings.hierarchical_allreduce),
        "HOROVOD_HIERARCHICAL_ALLGATHER": str(settings.hierarchical_allgather),
        "HOROVOD_CACHE_CAPACITY": "above 0" if settings.cache_capacity else "0",
        "the list of process sets": brief(str([list(sets.ranks(id)) for id in sets.ids()[1:]])),
    }


def _assemble(
    settings: Settings, sets: ProcessSets, topology: Topology, channel: Channel, connect: _Connector, store: Store
) -> Engine:
    backends: dict[int, SetBackends] = {}
    try:
        for id in sets.ids():
            members = sets.ranks(id)
            if topology.rank in members:
                backends[id] = connect.through(store, members, f"set-{id}")
        return Engine(topology, settings, sets, channel, backends, connect)
    except BaseException as error:
        table.discard((backend for each in backends.values() for backend in each.by_device.values()), error)
        raise


@dataclass(frozen=True, slots=True)
class _Connector:
    """Connects the members of a process set, now or later."""

    settings: Settings
    topology: Topology
    open_store: OpenStore
    address: str

    def __call__(self, members: Sequence[int], scope: str, check: Callable[[], None]) -> SetBackends:
        with self.open_store() as store:
            self._await(PrefixStore(store, f"{scope}/here"), members, check)
            return self.through(store, members, scope)

    def _await(self, store: Store, members: Sequence[int], check: Callable[[], None]) -> None:
        """Return when all members are there: one that is lost before is noticed here, but not inside of a backend."""
        deadline = time.monotonic() + self.settings.timeouts.connect
        store.set(str(self.topology.rank), b"")
        for member in members:
            while not _is_there(store, member):
                check()
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(f"rank {member} did not come to connect the new process set in time")

    def through(self, store: Store, members: Sequence[int], scope: str) -> SetBackends:
        """The backends of the set ``members``, which find each other under ``scope`` in ``store``."""
        return SetBackends.of(
            table.connect(members, self.topology, self.settings, PrefixStore(store, scope), self.address)
        )


def _is_there(store: Store, member: int) -> bool:
    try:
        store.get(str(member), SLICE_SECONDS)
    except CollectiveTimeoutError:
        return False
    return True


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
