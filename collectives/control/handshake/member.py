"""The handshake of the ranks other than 0: with rank 0, and within a host that has a relay."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from collectives import descriptors
from collectives.api import CollectiveTimeoutError, PeerLostError
from collectives.attempt import ConnectAttempt
from collectives.control.handshake.admission import GO, Admission
from collectives.control.handshake.call import call
from collectives.control.handshake.callee import Callee, NoListenerError
from collectives.control.handshake.center import RESERVED
from collectives.control.handshake.connected import Connected, Offer
from collectives.control.handshake.entries import Entries
from collectives.control.handshake.hello import LocalEnd, pack_answer
from collectives.control.handshake.search import find_center
from collectives.control.relay import Relay
from collectives.control.sockets import Connection, SocketChannel
from collectives.control.tree import Leader, Leaf, relays
from collectives.planning.aggregation import Aggregator
from collectives.planning.process_sets import ProcessSets

__all__ = ["join_center"]


def join_center(end: LocalEnd, entries: Entries, process_sets: ProcessSets, offer: Offer) -> Connected:
    """See :func:`collectives.control.handshake.channel.connect_channel`."""
    with ExitStack() as stack:
        center, start, (hosts, cores) = find_center(end, entries)
        stack.callback(center.sock.close)
        entries.passed(start)
        hosts, mine = tuple(hosts), cores[end.hello.host]
        served = relays(hosts)
        ranks = next((ranks for ranks in served.values() if end.hello.rank in ranks), ())
        admission = None
        with center.hearing_errors():
            reserve = stack.enter_context(descriptors.Reserve(RESERVED))
            if ranks and ranks[0] == end.hello.rank:
                admission = stack.enter_context(Admission(end, ranks[1:], center))
            answer = pack_answer((None if admission is None else admission.entry, offer(hosts, mine)))
        center.send(answer)
        offers = center.answer()
        reserve.release()
        neighbours: Mapping[int, socket.socket] = {}
        if served:
            with center.consulting():
                neighbours = _connect_host(end, center, ranks, admission, offers)
                for sock in neighbours.values():
                    stack.callback(sock.close)
            _await_go(center)
        channel = _channel(end, center, ranks, neighbours, process_sets)
        stack.pop_all()
        if admission is not None:
            admission.__exit__(None, None, None)
    return Connected(channel, hosts, mine, tuple(backends for _, backends in offers), start)


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
    neighbours: Mapping[int, socket.socket],
    process_sets: ProcessSets,
) -> SocketChannel:
    rank, size = end.hello.rank, end.hello.size
    lifeline, connections = Connection(center.sock), {each: Connection(sock) for each, sock in neighbours.items()}
    if not ranks:
        return SocketChannel(rank, size, {0: lifeline})
    if rank != ranks[0]:
        return Leaf(rank, size, ranks[0], connections[ranks[0]], lifeline)
    mine, theirs = socket.socketpair()
    relay = Relay(rank, lifeline, {rank: Connection(theirs), **connections}, Aggregator(ranks, process_sets))
    return Leader(rank, size, Connection(mine), relay)
