"""The handshake: rank 0 admits the other ranks, each of which finds rank 0 and connects within its host."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from collectives.api import CollectiveTimeoutError, PeerLostError, SettingsError, Store
from collectives.controller.aggregation import Aggregator
from collectives.controller.process_sets import ProcessSets
from collectives.handshake.admission import Admission
from collectives.handshake.dial import Callee, NoListenerError, call
from collectives.handshake.entries import EndWatch, Entries, Starts
from collectives.handshake.hello import GO, Hello, LocalEnd, pack_answer
from collectives.handshake.hosts import HostsAdmission
from collectives.handshake.leaders import Forwarder
from collectives.handshake.search import find_center
from collectives.net import descriptors
from collectives.net.attempts import ConnectAttempt
from collectives.net.relay import Center, Follower, Leader, Leaf, Relay, relays
from collectives.net.sockets import Connection, SocketChannel

SHOWN_RANKS = 8
SHOWN_CHARACTERS = 200


def brief(value: str) -> str:
    """``value``, or its beginning and a digest when it is too long to show and to send around."""
    if len(value) <= SHOWN_CHARACTERS:
        return value
    return f"{value[:SHOWN_CHARACTERS]}... (SHA-256 {hashlib.sha256(value.encode()).hexdigest()[:16]})"


def disagreement(configurations: Sequence[Mapping[str, str]]) -> str | None:
    """For each rank, in order, name -> value: a text with the different values and their ranks; None when all agree."""
    names = dict.fromkeys(name for configuration in configurations for name in configuration)
    texts = [_difference(name, [each.get(name, "") for each in configurations]) for name in names]
    different = "; ".join(text for text in texts if text)
    return f"{different}; it must be the same on all ranks" if different else None


def _difference(name: str, values: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    if len(ranks) == 1:
        return ""
    return f"{name} is " + " and ".join(f"{value!r} on {_list(some)}" for value, some in ranks.items())


def _list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:SHOWN_RANKS]))
    more = f" and {len(ranks) - SHOWN_RANKS} more" if len(ranks) > SHOWN_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


Offer: TypeAlias = Callable[[tuple[str, ...], int], bytes]
"""The host of each rank, and the cores that the ranks of this host share -> the addresses that this rank offers."""


@dataclass(frozen=True, slots=True)
class HandshakeResult:
    """A channel to the other ranks, and their answers.

    ``hosts[r]`` is the host of rank ``r``, ``offers[r]`` its offer. ``cores`` is the number of distinct cores that the
    ranks of this rank's host may use; it is the same on all of them. ``start`` is the number of this start of the
    world.
    """

    channel: SocketChannel
    hosts: tuple[str, ...]
    cores: int
    offers: tuple[bytes, ...]
    start: int


RESERVED = 4
"""Descriptors for the channel of a rank, or for the report that it cannot connect: no more than two of either."""


def admit_members(end: LocalEnd, entries: Entries, offer: Offer, watch: EndWatch) -> HandshakeResult:
    """As :func:`connect_channel`."""
    hello = end.hello
    start = entries.next
    publishing = partial(_publishing_failure, end, entries, start)
    with (
        publishing(),
        descriptors.Reserve(RESERVED) as reserve,
        (HostsAdmission if end.is_large else Admission)(end, range(1, hello.size)) as admission,
        publishing(reserve, admission),  # before the admission closes its listeners
    ):
        entries.publish(start, admission.entry)
        with end.attempt.checking(watch.check):
            peers = admission.admit_all()
        hellos = [hello, *map(admission.hello, range(1, hello.size))]
        problem = disagreement([each.configuration for each in hellos])
        if problem is not None:
            raise SettingsError(problem)
        hosts, cores = tuple(each.host for each in hellos), _cores(hellos)
        served = admission.served()
        admission.answer((hosts, cores, True) if served else (hosts, cores))
        mine = offer(hosts, cores[hello.host])
        offers = {0: (None, mine), **admission.collect()}
        admission.answer([offers[rank] for rank in range(hello.size)])
        if served:
            entries.withdraw_leaders(admission.entry["id"])
        elif relays(hosts):
            admission.confirm()
            admission.answer(GO)
    connections = {rank: Connection(peer.wire.sock) for rank, peer in peers.items()}
    channel = Center(hello.size, connections, served, {}) if served else _center_channel(hosts, connections)
    return HandshakeResult(
        channel, hosts, cores[hello.host], tuple(offers[rank][1] for rank in range(hello.size)), start
    )


@contextmanager
def _publishing_failure(
    end: LocalEnd,
    entries: Entries,
    start: int,
    reserve: descriptors.Reserve | None = None,
    admission: Admission | None = None,
) -> Iterator[None]:
    """Send an error of the block to the admitted ranks, and publish it in the place of the entry for all others."""
    try:
        yield
    except BaseException as error:
        reason = descriptors.explained(error, end.hello.rank)
        if reserve is not None:
            reserve.release()
        if admission is not None:
            admission.dismiss(reason)
        entries.publish_error(start, reason)
        if reason is error:
            raise
        raise reason from error


def _cores(hellos: Sequence[Hello]) -> dict[str, int]:
    """For each host the number of cores that its ranks may use together."""
    cores: dict[str, set[int]] = {}
    for hello in hellos:
        cores.setdefault(hello.host, set()).update(hello.cores)
    return {host: len(numbers) for host, numbers in cores.items()}


def _center_channel(hosts: Sequence[str], connections: Mapping[int, Connection]) -> SocketChannel:
    served = relays(hosts)
    if not served:
        return SocketChannel(0, len(hosts), connections)
    followers = {rank for leader, ranks in served.items() for rank in ranks if rank != leader}
    direct = {rank: connection for rank, connection in connections.items() if rank not in followers}
    return Center(len(hosts), direct, served, {rank: connections[rank] for rank in followers})


def join_center(end: LocalEnd, entries: Entries, process_sets: ProcessSets, offer: Offer) -> HandshakeResult:
    """As :func:`connect_channel`."""
    with ExitStack() as stack:
        forwarder = Forwarder(end) if end.may_lead else None
        if forwarder is not None:
            stack.enter_context(forwarder)
        center, start, (hosts, cores, *leads) = find_center(end, entries, forwarder)
        stack.callback(center.sock.close)
        entries.passed(start)
        hosts, mine = tuple(hosts), cores[end.hello.host]
        served = {} if leads else relays(hosts)
        ranks = next((ranks for ranks in served.values() if end.hello.rank in ranks), ())
        admission = None
        with center.hearing_errors():
            reserve = stack.enter_context(descriptors.Reserve(RESERVED))
            if ranks and ranks[0] == end.hello.rank:
                admission = stack.enter_context(Admission(end, ranks[1:], center))
            answer = pack_answer((None if admission is None else admission.entry, offer(hosts, mine)))
        center.send(answer)
        offers = center.told()
        reserve.release()
        neighbours: Mapping[int, socket.socket] = {}
        if served:
            with center.consulting():
                neighbours = _connect_host(end, center, ranks, admission, offers)
                for sock in neighbours.values():
                    stack.callback(sock.close)
            _await_go(center)
        connections = {rank: Connection(sock) for rank, sock in neighbours.items()}
        if forwarder is not None and forwarder.connections:
            connections, ranks = forwarder.connections, (end.hello.rank, *sorted(forwarder.connections))
        channel = _channel(end, center, ranks, connections, process_sets, speaks=bool(leads))
        stack.pop_all()
        for each in (admission, forwarder):
            if each is not None:
                each.__exit__(None, None, None)
    return HandshakeResult(channel, hosts, mine, tuple(backends for _, backends in offers), start)


def _connect_host(
    end: LocalEnd, center: Callee, ranks: Sequence[int], admission: Admission | None, offers: Sequence[Any]
) -> dict[int, socket.socket]:
    """The connections of this rank to others of its host: of the leader to all, and of the others to the leader."""
    if admission is not None:
        peers = admission.admit_all()
        admission.answer(None)
        return {rank: peer.wire.sock for rank, peer in peers.items()}
    return {ranks[0]: _call_leader(end, center, offers[ranks[0]][0], ranks[0])} if ranks else {}


def _call_leader(end: LocalEnd, center: Callee, entry: Any, leader: int) -> socket.socket:
    """The connection to ``leader``, which admitted this rank; ends with the reason of rank 0 as soon as it has one."""

    def check() -> None:
        end.attempt.check()
        if center.has_answer:
            center.answer()
            raise CollectiveTimeoutError(f"rank {leader} did not answer in time; its process may be stopped", [leader])

    with ConnectAttempt(end.attempt.remaining, check) as attempt:
        try:
            callee, _ = call(replace(end, attempt=attempt), entry, leader, lambda seconds: attempt.wait({}, seconds))
        except NoListenerError as error:
            raise PeerLostError(str(error), [leader]) from error
    return callee.sock


def _await_go(center: Callee) -> None:
    """Return when all ranks have connected within their hosts."""
    center.send(pack_answer(None))
    while center.answer() is not GO:
        continue  # rank 0 asked before it had the confirmation; its reason for the end follows


def _channel(
    end: LocalEnd,
    center: Callee,
    ranks: Sequence[int],
    connections: Mapping[int, Connection],
    process_sets: ProcessSets,
    speaks: bool,
) -> SocketChannel:
    rank, size, lifeline = end.hello.rank, end.hello.size, Connection(center.sock)
    if center.host:
        return Follower(rank, size, center.host, lifeline)
    if not ranks:
        return SocketChannel(rank, size, {0: lifeline})
    if rank != ranks[0]:
        return Leaf(rank, size, ranks[0], connections[ranks[0]], lifeline)
    mine, theirs = socket.socketpair()
    relay = Relay(rank, lifeline, {rank: Connection(theirs), **connections}, Aggregator(ranks, process_sets), speaks)
    return Leader(rank, size, Connection(mine), relay)


def connect_channel(
    end: LocalEnd, store: Store, process_sets: ProcessSets, offer: Offer, starts: Starts | None = None
) -> HandshakeResult:
    """Connect to the other ranks of the world, which find each other in ``store``, that of their job.

    ``offer`` is called once. ``starts`` holds what this process knows about earlier starts. Raises
    CollectiveTimeoutError that names the missing ranks, PeerLostError, SettingsError when the ranks were started in
    different ways, what ``offer`` raises on any rank, and the error that the attempt was aborted with.
    """
    entries = Entries(end.hello, store, starts or Starts())
    try:
        if end.hello.rank == 0:
            return admit_members(end, entries, offer, EndWatch(store))
        return join_center(end, entries, process_sets, offer)
    except PeerLostError as error:
        if type(error) is PeerLostError:
            raise
        # A launcher knows the lost rank as the cause by the printed name of this class; subclasses stay in this folder.
        raise PeerLostError(str(error), error.ranks, error.hosts) from error
