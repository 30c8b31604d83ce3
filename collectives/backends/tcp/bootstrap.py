"""How the members of a TCP group connect: each listens on a port of its own, and calls the members before it."""

from __future__ import annotations

import select
import socket
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial

import msgpack

from collectives.api import CollectiveTimeoutError, override
from collectives.backends.base import Bootstrap, Group
from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.encryption import Encryption
from collectives.backends.tcp.link import SecureLink, TcpLink
from collectives.handshake.dial import BrokenCallError, GoneError, NoListenerError, call
from collectives.handshake.hello import Hello, LocalEnd, Peer, objection
from collectives.handshake.listeners import MOST_CANDIDATES, Candidates, Listeners
from collectives.net.attempts import ConnectAttempt


def listeners_of(hello: Hello, address: str) -> Listeners:
    """Those of a member with this ``hello`` at ``address``; strangers have room in the queue, too."""
    return Listeners(hello, address, hello.size + MOST_CANDIDATES, within_host=False)


class TcpReception:
    """Admits the members of ``group`` at the positions ``expected``, which call ``listeners``."""

    def __init__(self, end: LocalEnd, group: Group, listeners: Listeners, expected: Collection[int]) -> None:
        self._end = end
        self._group = group
        self._missing = {group.ranks[position]: position for position in expected}
        self._poller = select.poll()
        self._candidates = Candidates(end, listeners, self._poller, len(expected), self._admit)
        self.admitted: dict[int, socket.socket] = {}
        """The connections of the admitted members, by position; the caller owns them."""

    def admit_all(self) -> None:
        """Return when all have come. Raises CollectiveTimeoutError that names the missing ones."""
        with closing(self._candidates):
            while self._missing:
                self._candidates.make_room()
                ready = self._end.attempt.poll(self._poller, self._candidates.next_look())
                if self._end.attempt.is_over:
                    raise self._late()
                for descriptor in ready:
                    self._candidates.attend(descriptor)

    def _admit(self, peer: Peer) -> None:
        sock, refusal = peer.wire.sock, objection(peer.hello, self._end.hello, self._missing)
        try:
            peer.answer(None, refusal)
        except BaseException:
            sock.close()
            raise
        if refusal is None:
            self.admitted[self._missing.pop(peer.hello.rank)] = sock
        else:
            sock.close()
            self._candidates.warn("a connection", f": {refusal}")

    def _late(self) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._group.describe(self._missing.values())} did not connect in time; look at their output, or raise "
            "HOROVOD_GLOO_TIMEOUT_SECONDS",
            list(self._missing),
        )


class TcpBootstrap(Bootstrap):
    """A :class:`Bootstrap`.

    ``timeout`` bounds a silence of the peers within an operation, in seconds. The peers reach this host at ``address``,
    and prove that they know ``secret``, as this member does. ``crowded``: the host has more ranks than cores. With
    ``encrypted`` all data travels in TLS. Raises SettingsError for an address that this host does not have.
    """

    def __init__(
        self, group: Group, timeout: float, address: str, secret: bytes, crowded: bool, encrypted: bool = False
    ) -> None:
        position = group.position
        self._encryption = Encryption(secret) if encrypted else None
        self._hello = Hello(group.ranks[position], group.size, group.hosts[position])
        self._timeout = timeout
        self._address = address
        self._secret = secret
        self._crowded = crowded
        self._listeners = listeners_of(self._hello, address)
        try:
            self._listeners.__enter__()
            super().__init__(group, msgpack.packb({**self._listeners.entry, "crowded": crowded}))
        except BaseException:
            self.close()
            raise

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> TcpBackend:
        """A member calls first, in the order of the members, and then admits: so nobody waits in a circle."""
        end = LocalEnd(self._hello, self._secret, self._address, self._timeout, attempt)
        found: dict[int, socket.socket] = {}
        with ExitStack() as stack:
            stack.callback(_close_all, found)
            for position in range(self.group.position):
                found[position] = self._call(end, position, offers[position])
            reception = TcpReception(end, self.group, self._listeners, range(self.group.position + 1, self.group.size))
            stack.callback(_close_all, reception.admitted)
            reception.admit_all()
            found.update(reception.admitted)
            links = {position: self._link(found, position, attempt) for position in self.group.others}
            backend = TcpBackend(self.group, links, self._timeout, self._crowded, _in_star(offers))
            stack.pop_all()
        return backend

    def _call(self, end: LocalEnd, position: int, offer: bytes) -> socket.socket:
        """The connection to the member at ``position``.

        A member that listens no more has ended, or its start has failed: the control channel tells which of the two, by
        an abort of the attempt. Without it nobody knows before the time is over.
        """
        pause = partial(end.attempt.wait, {})
        try:
            callee, _ = call(end, msgpack.unpackb(offer), self.group.ranks[position], pause)
        except (BrokenCallError, GoneError, NoListenerError) as error:
            end.attempt.wait({})
            text = f"{self.group.describe([position])} did not connect in time ({error})"
            raise CollectiveTimeoutError(text, self.group.ranks_at([position])) from error
        return callee.sock

    def _link(self, found: dict[int, socket.socket], position: int, attempt: ConnectAttempt) -> TcpLink:
        """The link over the connection that was ``found``.

        The members encrypt their connections in the order of the other members, so nobody waits in a circle.
        """
        if self._encryption is None:
            return TcpLink(found[position], position)
        is_server = self.group.position < position
        sock = self._encryption.wrap(found[position], is_server, self.group.ranks[position], attempt)
        found[position] = sock
        return SecureLink(sock, position)

    @override
    def close(self) -> None:
        self._listeners.__exit__()


def _close_all(sockets: Mapping[int, socket.socket]) -> None:
    for sock in sockets.values():
        sock.close()


def _in_star(offers: Sequence[bytes]) -> bool:
    """Whether the members vote through one of them: where some of more than two share cores. All find the same."""
    return len(offers) > 2 and any(msgpack.unpackb(offer)["crowded"] for offer in offers)
