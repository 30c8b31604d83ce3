"""The handshake of the ranks other than 0: with rank 0, and within a host that has a relay."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

from collectives import descriptors
from collectives.api import EngineError, HorovodInternalError, PeerLostError
from collectives.control import envelope
from collectives.control.handshake.admission import Admission
from collectives.control.handshake.call import call
from collectives.control.handshake.callee import Callee
from collectives.control.handshake.center import RESERVED
from collectives.control.handshake.connected import Connected, Offer
from collectives.control.handshake.entries import Entries
from collectives.control.handshake.hello import LocalEnd, pack_answer
from collectives.control.handshake.search import find_center
from collectives.control.relay import Relay
from collectives.control.sockets import Connection, SocketChannel
from collectives.control.tree import Leader, Leaf, relays
from collectives.planning.aggregation import Aggregator
from collectives.planning.errors import unpack
from collectives.planning.messages import Abort, decode
from collectives.planning.process_sets import ProcessSets

__all__ = ["join_center"]


def join_center(end: LocalEnd, entries: Entries, process_sets: ProcessSets, offer: Offer) -> Connected:
    """See :func:`collectives.control.handshake.start.connect_channel`."""
    with ExitStack() as stack:
        center, start, (hosts, cores) = find_center(end, entries)
        stack.callback(center.sock.close)
        entries.passed(start)
        hosts = tuple(hosts)
        mine = cores[end.hello.host]
        ranks = next((ranks for ranks in relays(hosts).values() if end.hello.rank in ranks), ())
        admission = None
        with center.hearing_errors():
            reserve = stack.enter_context(descriptors.Reserve(RESERVED))
            if ranks and ranks[0] == end.hello.rank:
                admission = stack.enter_context(Admission(end, ranks[1:], center.sock))
            answer = pack_answer((None if admission is None else admission.entry, offer(hosts, mine)))
        with suppress(OSError):  # the answer to it, which is next, gives the reason
            center.send(answer)
        offers = center.answer()
        reserve.release()
        channel = _channel(end, center, ranks, admission, offers, process_sets)
        stack.pop_all()
        if admission is not None:
            admission.__exit__(None, None, None)
    return Connected(channel, hosts, mine, tuple(backends for _, backends in offers), start)


def _channel(
    end: LocalEnd,
    center: Callee,
    ranks: Sequence[int],
    admission: Admission | None,
    offers: Sequence[Any],
    process_sets: ProcessSets,
) -> SocketChannel:
    rank, size = end.hello.rank, end.hello.size
    if not ranks:
        return SocketChannel(rank, size, {0: Connection(center.sock)})
    if admission is None:
        leader = ranks[0]
        sock = _join(end, offers[leader][0], leader).sock
        return Leaf(rank, size, leader, Connection(sock), Connection(center.sock))
    peers = _admit_followers(admission, center.sock)
    admission.answer(None)
    connections = {each: Connection(peer.wire.sock) for each, peer in peers.items()}
    mine, theirs = socket.socketpair()
    relay = Relay(
        rank, Connection(center.sock), {rank: Connection(theirs), **connections}, Aggregator(ranks, process_sets)
    )
    return Leader(rank, size, Connection(mine), relay)


def _admit_followers(admission: Admission, center: socket.socket) -> Mapping[int, Any]:
    try:
        return admission.admit_all()
    except PeerLostError as error:
        raise _last_words(center) or error from error


def _last_words(center: socket.socket) -> HorovodInternalError | None:
    """The reason that rank 0 sent before it hung up."""
    with suppress(EngineError):
        for frame in Connection(center).receive():
            message = decode(envelope.unpack(frame)[1])
            if isinstance(message, Abort):
                return unpack(message.error)
    return None


def _join(end: LocalEnd, entry: Any, host: int) -> Callee:
    """A connection to rank ``host``, which admitted this one."""
    other, _ = call(end, entry, host, lambda seconds: end.attempt.wait({}, seconds))
    return other
