"""A world -> a running engine.

The handshake of some backends succeeds although the other process is stopped: the kernel answers for it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import msgpack

from collectives.api import (
    CollectiveTimeoutError,
    EngineError,
    HorovodInternalError,
    PeerLostError,
    SettingsError,
    ShutDownError,
    Store,
    Topology,
    World,
)
from collectives.backends import registry
from collectives.backends.base import Backend, Bootstrap
from collectives.controller.errors import for_other_ranks, pack, unpack
from collectives.controller.messages import (
    COORDINATOR,
    Abort,
    Accusation,
    Connected,
    Message,
    Ping,
    Pong,
    decode,
    encode,
)
from collectives.controller.process_sets import ProcessSets
from collectives.cores import usable_cores
from collectives.engine.engine import Engine
from collectives.engine.registration import Form, SetBackends
from collectives.engine.shutdown import Ending
from collectives.handshake import HandshakeResult, Hello, connect_channel
from collectives.handshake.connect import brief
from collectives.handshake.entries import Starts
from collectives.handshake.hello import LocalEnd
from collectives.net import descriptors
from collectives.net.attempts import ConnectAttempt
from collectives.net.channel import InprocHub
from collectives.net.interfaces import address_of
from collectives.net.sockets import SocketChannel
from collectives.settings import Settings
from collectives.stalls.liveness import GRACE_SECONDS, LivenessCheck, verdict
from collectives.store.client import RendezvousClient
from collectives.store.memory import PrefixStore

POLL_SECONDS = 0.01
REASON_SECONDS = 0.1
"""How long a rank that lost another waits for a better explanation."""
VERDICT_SECONDS = 2 * GRACE_SECONDS
"""Rank 0 has given its verdict within this time, unless it is stopped itself."""
VARIABLE = "HOROVOD_GLOO_TIMEOUT_SECONDS"


class StartupBarrier:
    """One rank's messages about the start, over ``channel``, until the engine uses that. ``hosts`` are those of ranks.

    Every rank answers the liveness check of rank 0 while its backends connect. So the error of a rank that waited too
    long names the ranks that are stopped. For one thread.
    """

    def __init__(self, channel: SocketChannel, hosts: Sequence[str]) -> None:
        self._channel = channel
        self._hosts = hosts
        self._is_coordinator = channel.rank == COORDINATOR
        self._peers = tuple(range(1, channel.size)) if self._is_coordinator else (COORDINATOR,)
        self._awaited = set(self._peers)
        self._liveness = LivenessCheck(self._peers, channel.leaders)
        self._verdict: HorovodInternalError | None = None

    def check(self) -> None:
        """Hear the other ranks, without a wait; raises the error that ends the start on all ranks."""
        arrivals = self._channel.receive()
        while arrivals and (self._awaited or self._is_coordinator):
            sender, data = arrivals.pop(0)
            self._hear(sender, decode(data))
        if arrivals:
            self._channel.put_back(arrivals)  # rank 0 runs its engine already
        self._look(time.monotonic())
        if self._verdict is not None:
            raise self._verdict

    def _hear(self, sender: int, message: Message) -> None:
        if isinstance(message, Connected):
            self._awaited.discard(sender)
        elif isinstance(message, Ping):
            self._channel.send_directly((COORDINATOR,), encode(Pong()))
        elif isinstance(message, Pong):
            self._liveness.answered(sender, time.monotonic())
        elif isinstance(message, Accusation):
            self._accuse(unpack(message.error))
        elif isinstance(message, Abort):
            self._verdict = unpack(message.error)
        else:
            raise EngineError(f"{type(message).__name__} arrived while the backends connected")

    def confirm(self, attempt: ConnectAttempt) -> None:
        """The backends of this rank are connected: return when those of all ranks are.

        Raises CollectiveTimeoutError, the error of ``attempt``, and those of :meth:`check`.
        """
        if not self._is_coordinator:
            self._channel.send_to(self._peers, encode(Connected()))
        while self._awaited:
            attempt.check()
            if attempt.is_over:
                raise self._late()
            self._channel.poll(POLL_SECONDS)
            self.check()
        if self._is_coordinator:
            self._channel.send_to(self._peers, encode(Connected()))

    def _late(self) -> CollectiveTimeoutError:
        ranks = sorted(self._awaited)
        return CollectiveTimeoutError(f"ranks {ranks} did not report in time that their backends are connected", ranks)

    # Errors.

    def explain(self, error: BaseException, losses: Sequence[PeerLostError]) -> BaseException:
        """The best explanation of ``error``: the reason of another rank, a lost rank, or the verdict of rank 0."""
        if self._verdict is not None or not isinstance(error, PeerLostError | CollectiveTimeoutError):
            return self._verdict or error
        is_late = isinstance(error, CollectiveTimeoutError)
        if is_late:
            self._accuse(error)
        reason = self._reason(VERDICT_SECONDS if is_late else REASON_SECONDS, losses)
        if reason is None and is_late:
            return verdict(error, (self._channel.silent_rank,), VERDICT_SECONDS, self._hosts, VARIABLE)
        return reason or error

    def _reason(self, seconds: float, losses: Sequence[PeerLostError]) -> HorovodInternalError | None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                self.check()
            except HorovodInternalError as reason:
                return reason
            if losses:
                return losses[0]
            self._channel.poll(POLL_SECONDS)
        return None

    def _accuse(self, error: HorovodInternalError) -> None:
        """A rank gives up; rank 0 asks all ranks whether they run."""
        if self._is_coordinator:
            self._channel.send_directly(self._liveness.accuse(error, time.monotonic()), encode(Ping()))
        else:
            self._channel.send_directly((COORDINATOR,), encode(Accusation(pack(error))))

    def _look(self, now: float) -> None:
        result = self._liveness.settle(now) if self._liveness else None
        if result is not None and result.accusation is not None:
            self._verdict = verdict(result.accusation, result.silent, result.seconds, self._hosts, VARIABLE)

    def abort(self, error: HorovodInternalError) -> None:
        """End the start with ``error`` on all ranks that this one can reach, also those whose relay is stopped."""
        message = encode(Abort(pack(error)))
        self._channel.send_to(self._peers, message)
        self._channel.send_directly([rank for rank in self._peers if rank in self._channel.relayed], message)
        self._channel.skip_relays()


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
    local = world.topology.local_rank, world.topology.local_size
    end = LocalEnd(hello, settings.secret, address, settings.timeouts.heartbeat, attempt, *local)
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
            client.share_reads(world.host, world.topology.size)
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
        self._bootstraps: dict[int, list[Bootstrap]] = {}
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
                self._bootstraps[id] = registry.prepare(members, self.topology, self._settings, self._address)
        offers = {id: [bootstrap.offer for bootstrap in bootstraps] for id, bootstraps in self._bootstraps.items()}
        packed: bytes = msgpack.packb(offers)
        return packed

    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> dict[int, SetBackends]:
        """The backends of each process set; ``offers[r]`` is the offer of rank ``r``."""
        found = [msgpack.unpackb(offer, strict_map_key=False) for offer in offers]
        for id, bootstraps in self._bootstraps.items():
            of_members = [found[rank][id] for rank in self._sets.ranks(id)]
            self._backends[id] = SetBackends.of(_connect_all(bootstraps, of_members, attempt))
        return self._backends

    def discard(self, error: BaseException) -> None:
        """Discard the bootstraps and backends made so far."""
        bootstraps = [bootstrap for each in self._bootstraps.values() for bootstrap in each]
        backends = [backend for each in self._backends.values() for backend in each.by_device.values()]
        registry.discard(bootstraps, backends, error)


def _connect_all(
    bootstraps: Sequence[Bootstrap], offers: Sequence[Sequence[bytes]], attempt: ConnectAttempt
) -> list[Backend]:
    """The backends of ``bootstraps``; ``offers[i]`` are those of member i, one for each bootstrap."""
    backends: list[Backend] = []
    try:
        for bootstrap, of_members in zip(bootstraps, zip(*offers, strict=True), strict=True):
            backends.append(bootstrap.connect(of_members, attempt))
    except BaseException as error:
        registry.discard(bootstraps, backends, error)
        raise
    registry.discard(bootstraps, (), ShutDownError("connected"))
    return backends


def _assemble(
    settings: Settings,
    sets: ProcessSets,
    groups: _Groups,
    connected: HandshakeResult,
    form: Form,
    attempt: ConnectAttempt,
) -> Engine:
    """Connect the backends, while the channel watches the other ranks, and start the engine."""
    channel = connected.channel
    startup = StartupBarrier(channel, groups.topology.hosts)
    ending = Ending(groups.topology, settings.timeouts.shutdown)
    losses: list[PeerLostError] = []

    def lose(rank: int) -> None:
        losses.append(ending.loss(rank))
        attempt.abort(losses[0])

    try:
        channel.watch(lose)
        with _explaining_lack(channel.rank):
            with attempt.checking(startup.check):
                backends = groups.connect(connected.offers, attempt)
            startup.confirm(attempt)
            return Engine(groups.topology, settings, sets, channel, backends, form)
    except BaseException as error:
        reason = startup.explain(error, losses)
        startup.abort(for_other_ranks(reason, f"rank {channel.rank}"))
        channel.close()
        if reason is error:
            raise
        raise reason from error


class _Formation:
    """A :class:`Formation`. Raises SettingsError and HorovodInternalError."""

    def __init__(self, settings: Settings, topology: Topology, address: str, members: Sequence[int]) -> None:
        self._seconds = settings.timeouts.connect
        self._rank = topology.rank
        self._prepare = partial(registry.prepare, members, topology, settings, address)
        self._bootstraps: Sequence[Bootstrap] = ()

    def prepare(self) -> bytes:
        with _explaining_lack(self._rank):
            self._bootstraps = self._prepare()
        offer: bytes = msgpack.packb([bootstrap.offer for bootstrap in self._bootstraps])
        return offer

    def connect(self, offers: Sequence[bytes], check: Callable[[], None]) -> SetBackends:
        of_members = [msgpack.unpackb(offer) for offer in offers]
        with _explaining_lack(self._rank), ConnectAttempt(self._seconds, check) as attempt:
            return SetBackends.of(_connect_all(self._bootstraps, of_members, attempt))

    def close(self) -> None:
        registry.discard(self._bootstraps, (), ShutDownError("connected"))


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
