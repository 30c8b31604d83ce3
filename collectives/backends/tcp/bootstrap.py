"""How the members of a TCP group connect: each listens on a port of its own, and calls the members before it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import msgpack

from collectives.api import CollectiveTimeoutError, override
from collectives.backends.base import Bootstrap, Group, is_large
from collectives.backends.tcp.backend import TcpBackend
from collectives.backends.tcp.encryption import Encryption
from collectives.backends.tcp.sparse import SparseTransport
from collectives.backends.tcp.switchboard import MemberCallee, Switchboard, TcpReception, close_all, link_over
from collectives.backends.tcp.transport import TcpTransport
from collectives.handshake.dial import BrokenCallError, GoneError, NoListenerError, call
from collectives.handshake.hello import Hello, LocalEnd
from collectives.handshake.listeners import MOST_CANDIDATES, Listeners
from collectives.net.attempts import ConnectAttempt


def listeners_of(hello: Hello, address: str) -> Listeners:
    """Those of a member with this ``hello`` at ``address``; strangers have room in the queue, too."""
    return Listeners(hello, address, hello.size + MOST_CANDIDATES, within_host=False)


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
        self._has_given_up_listeners = False
        self._listeners = listeners_of(self._hello, address)
        try:
            self._listeners.__enter__()
            super().__init__(group, msgpack.packb({**self._listeners.entry, "crowded": crowded}))
        except BaseException:
            self.close()
            raise

    @override
    def connect(self, offers: Sequence[bytes], attempt: ConnectAttempt) -> TcpBackend:
        """A member calls first, in the order of the members, and then admits: so nobody waits in a circle.

        In a large group it does neither before an operation needs that.
        """
        end = LocalEnd(self._hello, self._secret, self._address, self._timeout, attempt)
        transport = self._connect_later(end, offers) if is_large(self.group.size) else self._connect_all(end, offers)
        return TcpBackend(transport)

    def _connect_later(self, end: LocalEnd, offers: Sequence[bytes]) -> TcpTransport:
        switchboard = Switchboard(self.group, end, offers, self._listeners, self._encryption)
        self._has_given_up_listeners = True
        try:
            return SparseTransport(self.group, switchboard, self._timeout, self._crowded)
        except BaseException:
            switchboard.close()
            raise

    def _connect_all(self, end: LocalEnd, offers: Sequence[bytes]) -> TcpTransport:
        found: dict[int, socket.socket] = {}
        with ExitStack() as stack:
            stack.callback(close_all, found)
            for position in range(self.group.position):
                found[position] = self._call(end, position, offers[position])
            reception = TcpReception(end, self.group, self._listeners, range(self.group.position + 1, self.group.size))
            stack.callback(close_all, reception.admitted)
            reception.admit_all()
            found.update(reception.admitted)
            link = partial(link_over, found, group=self.group, encryption=self._encryption, attempt=end.attempt)
            links = {position: link(position) for position in self.group.others}
            transport = TcpTransport(self.group, links, self._timeout, self._crowded, _in_star(offers))
            stack.pop_all()
        return transport

    def _call(self, end: LocalEnd, position: int, offer: bytes) -> socket.socket:
        """The connection to the member at ``position``.

        A member that listens no more has ended, or its start has failed: the control channel tells which of the two, by
        an abort of the attempt. Without it nobody knows before the time is over.
        """
        pause = partial(end.attempt.wait, {})
        try:
            callee, _ = call(end, msgpack.unpackb(offer), self.group.ranks[position], pause, MemberCallee)
        except (BrokenCallError, GoneError, NoListenerError) as error:
            end.attempt.wait({})
            text = f"{self.group.describe([position])} did not connect in time ({error})"
            raise CollectiveTimeoutError(text, self.group.ranks_at([position])) from error
        return callee.sock

    @override
    def close(self) -> None:
        if not self._has_given_up_listeners:
            self._listeners.__exit__()


def _in_star(offers: Sequence[bytes]) -> bool:
    """Whether the members vote through one of them: where some of more than two share cores. All find the same."""
    return len(offers) > 2 and any(msgpack.unpackb(offer)["crowded"] for offer in offers)
