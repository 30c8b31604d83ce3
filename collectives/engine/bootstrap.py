"""A world -> a running engine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import msgpack

from collectives import descriptors
from collectives.api import (
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    ShutDownError,
    Store,
    Topology,
    World,
)
from collectives.attempt import ConnectAttempt
from collectives.backends import table
from collectives.backends.base import Backend
from collectives.backends.joining import Joining
from collectives.control.handshake import Connected, Hello, connect_channel
from collectives.control.handshake.configuration import brief
from collectives.control.handshake.hello import LocalEnd
from collectives.control.handshake.starts import Starts
from collectives.control.inproc import InprocHub
from collectives.cores import usable_cores
from collectives.engine.confirmation import Confirmation
from collectives.engine.ending import Ending
from collectives.engine.engine import Engine
from collectives.engine.registration import Form
from collectives.engine.set_backends import SetBackends
from collectives.interfaces import address_of
from collectives.planning.process_sets import ProcessSets
from collectives.rendezvous.client import RendezvousClient
from collectives.rendezvous.store import PrefixStore
from collectives.settings import Settings

__all__ = ["connect", "own_address"]

CONNECTIONS_TO_A_RANK = 4
SPARE_DESCRIPTORS = 256

OpenStore: TypeAlias = Callable[[], AbstractContextManager[tuple[Store, Callable[[], None]]]]
"""The store of the job, and a function that ends calls to it."""


def connect(
    world: World,
    settings: Settings,
    process_sets: Sequence[Sequence[int]] = (),
    starts: Starts | None = None,
    attempt: ConnectAttempt | None = None,
) -> Engine:
    """Connect to the other ranks of ``world`` and start the engine of this rank.

    All ranks call this with the same ``process_sets``. A process that goes from world to world calls it again after
    ``engine.shutdown()``: with the next world, or with the same one, where ``starts`` must be the object of the earlier
    call. ``attempt`` bounds this call and lets another thread abort it; without it the connect timeout bounds it.

    Raises SettingsError, InvalidRequestError for the process sets, CollectiveTimeoutError or PeerLostError when a rank
    does not connect in time, ends, or is in another world. All ranks that have connected raise the same reason.
    """
    sets = ProcessSets(world.topology.size, process_sets)
    # Rank 0, relays and backends may connect to each other rank; the program has files of its own.
    descriptors.provide(CONNECTIONS_TO_A_RANK * world.topology.size + SPARE_DESCRIPTORS)
    with _explaining_lack(world.topology.rank), ExitStack() as stack:
        if world.rendezvous is None:
            return _connect_alone(world, settings, sets)
        if attempt is None:
            attempt = stack.enter_context(ConnectAttempt(settings.timeouts.connect))
        return _connect_together(world, settings, sets, starts or Starts(), attempt)


@contextmanager
def _explaining_lack(rank: int) -> Iterator[None]:
    """An error for which a lack of descriptors is the reason says so."""
    try:
        yield
    except Exception as error:
        reason = descriptors.explained(error, rank)
        if reason is error:
            raise
        raise reason from error


def _connect_alone(world: World, settings: Settings, sets: ProcessSets) -> Engine:
    topology = replace(world.topology, hosts=(world.host,), cores=usable_cores())
    groups = _Groups(settings, sets, topology, "127.0.0.1")
    form = partial(_Formation, settings, topology, "127.0.0.1")
    with ConnectAttempt(settings.timeouts.connect) as attempt:
        backends = groups.connect([groups.offer()], attempt)
    return Engine(topology, settings, sets, InprocHub(1).channel(0), backends, form)


def _connect_together(
    world: World, settings: Settings, sets: ProcessSets, starts: Starts, attempt: ConnectAttempt
) -> Engine:
    address = own_address(world, settings)
    rank, size = world.topology.rank, world.topology.size
    hello = Hello(
        rank, size, world.host, configuration=_configuration(settings, sets), job=world.job, round=world.round
    )
    end = LocalEnd(hello, settings.secret, address, settings.timeouts.heartbeat, attempt)
    groups = _Groups(settings, sets, world.topology, address)
    open_store = _rendezvous(world, settings)
    try:
        with open_store() as (store, close), attempt.interrupts(close):
            connected = connect_channel(end, store, sets, groups.offer_at, starts)
        form = partial(_Formation, settings, groups.topology, address)
        return _assemble(settings, sets, groups, connected, form, attempt)
    except BaseException as error:
        groups.discard(error)
        raise


def _rendezvous(world: World, settings: Settings) -> OpenStore:
    address, port = world.rendezvous or ("", 0)

    @contextmanager
    def open_store() -> Iterator[tuple[Store, Callable[[], None]]]:
        with closing(RendezvousClient(address, port, settings.secret, settings.timeouts.connect)) as client:
            yield PrefixStore(client, world.job), client.close

    return open_store


def _configuration(settings: Settings, sets: ProcessSets) -> dict[str, str]:
    """The settings that must be the same on all ranks."""
    return {
        "HOROVOD_CPU_OPERATIONS": settings.cpu_operations,
        "HVD_TCP_TLS": str(int(settings.tcp_tls)),
        "HOROVOD_GPU_OPERATIONS": settings.gpu_operations,
        "HOROVOD_HIERARCHICAL_ALLREDUCE": str(settings.hierarchical_allreduce),
        "HOROVOD_HIERARCHICAL_ALLGATHER": str(settings.hierarchical_allgather),
        "HOROVOD_TORUS_ALLREDUCE": str(int(settings.torus_allreduce)),
        "HOROVOD_CACHE_CAPACITY": "above 0" if settings.cache_capacity else "0",
        "the list of process sets": brief(str([list(sets.ranks(id)) for id in sets.ids()[1:]])),
    }


class _Groups:
    """The groups of this rank, one for each process set and kind of device, from the offers to the backends."""

    def __init__(self, settings: Settings, sets: ProcessSets, topology: Topology, address: str) -> None:
        self.topology = topology
        self._settings = settings
        self._sets = sets
        self._address = address
        self._joinings: dict[int, list[Joining]] = {}
        self._backends: dict[int, SetBackends] = {}

    def offer_at(self, hosts: tuple[str, ...], cores: int) -> bytes:
        """The addresses of this rank, where rank ``r`` is on ``hosts[r]``."""
        self.topology = replace(self.topology, hosts=hosts, cores=cores)
        return self.offer()

    def offer(self) -> bytes:
        """The addresses of this rank for the other members of its groups."""
        for id in self._sets.ids():
            members = self._sets.ranks(id)
            if self.topology.rank in members:
                self._joinings[id] = table.prepare(members, self.topology, self._settings, self._address)
        offers = {id: [joining.offer for joining in joinings] for id, joinings in self._joinings.items()}
        packed: bytes = msgpack.packb(offers)
        return packed

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> dict[int, SetBackends]:
        """The backends of each process set; ``offers[r]`` is the offer of rank ``r``."""
        found = [msgpack.unpackb(offer, strict_map_key=False) for offer in offers]
        for id, joinings in self._joinings.items():
            of_members = [found[rank][id] for rank in self._sets.ranks(id)]
            self._backends[id] = SetBackends.of(_connect_all(joinings, of_members, attempt))
        return self._backends

    def discard(self, error: BaseException) -> None:
        """Discard the joinings and backends made so far."""
        joinings = [joining for each in self._joinings.values() for joining in each]
        backends = [backend for each in self._backends.values() for backend in each.by_device.values()]
        table.discard(joinings, backends, error)


def _connect_all(
    joinings: Sequence[Joining], offers: Sequence[Sequence[bytes]], attempt: ConnectAttempt
) -> list[Backend]:
    """The backends of ``joinings``; ``offers[i]`` are those of member i, one for each joining."""
    backends: list[Backend] = []
    try:
        for joining, of_members in zip(joinings, zip(*offers, strict=True), strict=True):
            backends.append(joining.connect(of_members, attempt))
    except BaseException as error:
        table.discard(joinings, backends, error)
        raise
    table.discard(joinings, (), ShutDownError("connected"))
    return backends


def _assemble(
    settings: Settings,
    sets: ProcessSets,
    groups: _Groups,
    connected: Connected,
    form: Form,
    attempt: ConnectAttempt,
) -> Engine:
    """Connect the backends, while the channel watches the other ranks, and start the engine."""
    channel = connected.channel
    confirmation = Confirmation(channel, groups.topology.hosts)
    ending = Ending(groups.topology, settings.timeouts.shutdown)
    losses: list[PeerLostError] = []

    def lose(rank: int) -> None:
        losses.append(ending.loss(rank))
        attempt.abort(losses[0])

    try:
        channel.watch(lose)
        with _explaining_lack(channel.rank):
            with attempt.checking(confirmation.check):
                backends = groups.connect(connected.offers, attempt)
            confirmation.confirm(attempt)
            return Engine(groups.topology, settings, sets, channel, backends, form)
    except BaseException as error:
        reason = confirmation.explain(error, losses)
        confirmation.abort(_for_other_ranks(reason))
        channel.close()
        if reason is error:
            raise
        raise reason from error


def _for_other_ranks(error: BaseException) -> HorovodInternalError:
    """The error for the other ranks when this rank ends with ``error``."""
    if isinstance(error, HorovodInternalError):
        return error
    if isinstance(error, Exception):
        return EngineError(f"a rank could not connect its backends: {type(error).__name__}: {error}")
    return ShutDownError(f"a rank was interrupted by {type(error).__name__}")


class _Formation:
    """See :class:`Formation`. Raises SettingsError and HorovodInternalError."""

    def __init__(self, settings: Settings, topology: Topology, address: str, members: Sequence[int]) -> None:
        self._seconds = settings.timeouts.connect
        self._rank = topology.rank
        self._prepare = partial(table.prepare, members, topology, settings, address)
        self._joinings: Sequence[Joining] = ()

    def prepare(self) -> bytes:
        """See :class:`Formation`."""
        with _explaining_lack(self._rank):
            self._joinings = self._prepare()
        offer: bytes = msgpack.packb([joining.offer for joining in self._joinings])
        return offer

    def connect(self, offers: Sequence[bytes], check: Callable[[], None]) -> SetBackends:
        """See :class:`Formation`."""
        of_members = [msgpack.unpackb(offer) for offer in offers]
        with _explaining_lack(self._rank), ConnectAttempt(self._seconds, check) as attempt:
            return SetBackends.of(_connect_all(self._joinings, of_members, attempt))

    def close(self) -> None:
        """See :class:`Formation`."""
        table.discard(self._joinings, (), ShutDownError("connected"))


def own_address(world: World, settings: Settings) -> str:
    """The address of the interface that was named, or of the one that leads to the rendezvous, for the other ranks."""
    if settings.interface:
        return address_of(settings.interface)
    host, port = world.rendezvous or ("", 0)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise SettingsError(f"HOROVOD_GLOO_RENDEZVOUS_ADDR is {host!r}; this host cannot reach it: {error}") from error
