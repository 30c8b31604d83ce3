"""The handshake of rank 0: it admits the other ranks, and passes on their answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from collectives import descriptors
from collectives.api import SettingsError
from collectives.control.handshake.admission import GO, Admission
from collectives.control.handshake.configuration import disagreement
from collectives.control.handshake.connected import Connected, Offer
from collectives.control.handshake.entries import Entries
from collectives.control.handshake.hello import Hello, LocalEnd
from collectives.control.handshake.notes import EndWatch
from collectives.control.sockets import Connection, SocketChannel
from collectives.control.tree import Center, relays

__all__ = ["RESERVED", "admit_members"]

RESERVED = 4
"""Descriptors for the channel of a rank, or for the report that it cannot connect: no more than two of either."""


def admit_members(end: LocalEnd, entries: Entries, offer: Offer, watch: EndWatch) -> Connected:
    """See :func:`collectives.control.handshake.channel.connect_channel`."""
    hello = end.hello
    start = entries.next
    publishing = partial(_publishing_failure, end, entries, start)
    with (
        publishing(),
        descriptors.Reserve(RESERVED) as reserve,
        Admission(end, range(1, hello.size)) as admission,
        publishing(reserve, admission),  # before the admission closes its listeners
    ):
        entries.publish(start, admission.entry)
        with end.attempt.checking(watch.check):
            peers = admission.admit_all()
        hellos = [hello, *(peers[rank].hello for rank in range(1, hello.size))]
        problem = disagreement([each.configuration for each in hellos])
        if problem is not None:
            raise SettingsError(problem)
        hosts, cores = tuple(each.host for each in hellos), _cores(hellos)
        admission.answer((hosts, cores))
        mine = offer(hosts, cores[hello.host])
        offers = {0: (None, mine), **admission.collect()}
        admission.answer([offers[rank] for rank in range(hello.size)])
        if relays(hosts):
            admission.confirm()
            admission.answer(GO)
    connections = {rank: Connection(peer.wire.sock) for rank, peer in peers.items()}
    channel = _channel(hosts, connections)
    return Connected(channel, hosts, cores[hello.host], tuple(offers[rank][1] for rank in range(hello.size)), start)


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


def _channel(hosts: Sequence[str], connections: Mapping[int, Connection]) -> SocketChannel:
    served = relays(hosts)
    if not served:
        return SocketChannel(0, len(hosts), connections)
    followers = {rank for leader, ranks in served.items() for rank in ranks if rank != leader}
    direct = {rank: connection for rank, connection in connections.items() if rank not in followers}
    return Center(len(hosts), direct, served, {rank: connections[rank] for rank in followers})
