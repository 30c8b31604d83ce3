"""How a member gets its links: it calls those before it in the group, and admits the others.

In a large group a link is made when an operation needs it for the first time. Both ends need it in the same operation,
so the one that comes first waits for the other. A member admits others also while it calls: nobody waits in a circle.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

import msgpack

from collectives.api import LONGEST_SECONDS, CollectiveTimeoutError, PeerLostError, override
from collectives.backends.base import Call, Group
from collectives.backends.tcp.encryption import Encryption
from collectives.backends.tcp.link import SecureLink, TcpLink
from collectives.handshake.dial import Callee, call
from collectives.handshake.hello import LocalEnd, Peer, objection
from collectives.handshake.listeners import MOST_CANDIDATES, Candidates, Listeners
from collectives.net import descriptors
from collectives.net.attempts import ConnectAttempt


class TcpReception:
    """Admits the members of ``group`` at the positions ``expected``, which call ``listeners``.

    ``poller`` is that of an owner who does not call :meth:`admit_all`.
    """

    def __init__(
        self,
        end: LocalEnd,
        group: Group,
        listeners: Listeners,
        expected: Collection[int],
        poller: select.epoll | None = None,
    ) -> None:
        self._end = end
        self._group = group
        self._missing = {group.ranks[position]: position for position in expected}
        self._poller = select.poll()
        count = min(len(expected), MOST_CANDIDATES)
        self._candidates = Candidates(end, listeners, poller or self._poller, count, self._admit)
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


class _Door(TcpReception):
    """Admits members now and then, as long as the group lasts."""

    def __init__(self, end: LocalEnd, group: Group, listeners: Listeners) -> None:
        self._epoll = select.epoll()
        super().__init__(end, group, listeners, range(group.position + 1, group.size), self._epoll)

    def fileno(self) -> int:
        """The descriptor, which can be read when somebody calls."""
        return self._epoll.fileno()

    def next_look(self) -> float:
        """When :meth:`attend` must be called at the latest, in monotonic seconds."""
        return self._candidates.next_look()

    def attend(self) -> None:
        """Admit those who have called. Does not wait. Raises NoDescriptorError."""
        self._candidates.make_room()
        for descriptor, _ in self._epoll.poll(0):
            try:
                self._candidates.attend(descriptor)
            except OSError as error:  # or a caller would take it for the end of the member that it calls
                raise descriptors.explained(error, self._end.hello.rank) from error
        self._candidates.make_room()

    def shut_down(self) -> None:
        """Let nobody wait for this member; from any thread, before :meth:`close`."""
        self._candidates.shut_down()
        shut_down_all(self.admitted)

    def close(self) -> None:
        """Close all but the connections of admitted members."""
        self._candidates.close()
        self._epoll.close()


class _Patience(ConnectAttempt):
    """The waits of a member for others, one after the other; it admits those who come through the ``door`` meanwhile.

    Each wait is bounded by the ``seconds`` since the last :meth:`renew`.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(min(seconds, LONGEST_SECONDS))
        self._seconds = seconds
        self.door: _Door | None = None

    def renew(self) -> None:
        """Another member has moved."""
        self.deadline = time.monotonic() + self._seconds

    @override
    def poll(self, poller: select.poll, limit: float) -> list[int]:
        assert self.door is not None
        door = self.door.fileno()
        poller.register(door, select.POLLIN)
        while True:
            found = [each for each in self._look(poller, limit) if each != door]
            if found or time.monotonic() >= min(limit, self.deadline):
                return found

    def admit(self) -> None:
        """Wait until somebody calls, or the time is over."""
        assert self.door is not None
        poller = select.poll()
        poller.register(self.door.fileno(), select.POLLIN)
        self._look(poller, self.deadline)

    def _look(self, poller: select.poll, limit: float) -> list[int]:
        assert self.door is not None
        found = super().poll(poller, min(limit, self.door.next_look()))
        self.door.attend()
        return found


class MemberCallee(Callee):
    """A member that is called. After the hello it takes all bytes for data of an operation, so no reason follows."""

    @override
    def _leave(self, reason: bytes) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


class Switchboard:
    """Makes the links of a member of ``group``, which listens at ``listeners``; owns them. For one thread.

    ``offers`` are the addresses of the members, by position. The heartbeat of ``end`` bounds the silence of a member.
    """

    def __init__(
        self, group: Group, end: LocalEnd, offers: Sequence[bytes], listeners: Listeners, encryption: Encryption | None
    ) -> None:
        self._group = group
        self._offers = offers
        self._listeners = listeners
        self._encryption = encryption
        self._attempt = _Patience(end.heartbeat)
        self._end = replace(end, attempt=self._attempt)
        self._called: dict[int, socket.socket] = {}
        try:
            self._attempt.door = self._door = _Door(self._end, group, listeners)
        except BaseException:
            self._attempt.close()
            raise

    def open(self, positions: Collection[int], check: Call) -> Iterator[TcpLink]:
        """The links to the members at ``positions``, of which none was made before; the caller owns them.

        ``check`` is called every few milliseconds, and may raise to end the wait. Raises PeerLostError and
        CollectiveTimeoutError.
        """
        descriptors.provide(len(positions))
        here = self._group.position
        with self._attempt.checking(check):
            self._door.attend()
            for position in sorted([each for each in positions if each < here], reverse=True):
                self._call(position)  # the nearest first: the calls of many do not meet at the first member
            self._await([position for position in positions if position > here])
            yield from map(self._link, sorted(positions))

    def _call(self, position: int) -> None:
        self._attempt.renew()
        where, pause = [position], partial(self._attempt.wait, {})
        entry, rank = msgpack.unpackb(self._offers[position]), self._group.ranks[position]
        try:
            callee, _ = call(self._end, entry, rank, pause, MemberCallee)
        except PeerLostError as error:
            text = f"the connection to {self._group.describe(where)} is gone; form a new job ({error})"
            raise PeerLostError(text, self._group.ranks_at(where), [self._group.hosts[position]]) from error
        except CollectiveTimeoutError as error:
            raise self._late(where) from error
        self._called[position] = callee.sock

    def _await(self, positions: Collection[int]) -> None:
        """Return when the members at ``positions`` have called."""
        admitted, came = self._door.admitted, -1
        while missing := [position for position in positions if position not in admitted]:
            if len(admitted) > came:
                self._attempt.renew()
            came = len(admitted)
            if self._attempt.is_over:
                raise self._late(missing)
            self._attempt.admit()

    def _late(self, positions: Sequence[int]) -> CollectiveTimeoutError:
        some = "at least one of " if len(positions) > 1 else ""
        return CollectiveTimeoutError(
            f"{some}{self._group.describe(positions)} did not answer in time: no connection for "
            f"{self._end.heartbeat:g} s",
            self._group.ranks_at(positions),
        )

    def _link(self, position: int) -> TcpLink:
        self._attempt.renew()
        found = self._called if position in self._called else self._door.admitted
        link = link_over(found, position, self._group, self._encryption, self._attempt)
        del found[position]
        return link

    def shut_down(self) -> None:
        """Let nobody wait for this member any more; from any thread, until :meth:`close`."""
        shut_down_all(self._listeners.by_descriptor)
        shut_down_all(self._called)
        self._door.shut_down()

    def close(self) -> None:
        """Release everything."""
        self._listeners.__exit__()
        self._door.close()
        close_all(self._called)
        close_all(self._door.admitted)
        self._attempt.close()


def link_over(
    found: dict[int, socket.socket],
    position: int,
    group: Group,
    encryption: Encryption | None,
    attempt: ConnectAttempt,
) -> TcpLink:
    """The link over the connection that was ``found``.

    The members encrypt their connections in the order of the other members, so nobody waits in a circle.
    """
    if encryption is None:
        return TcpLink(found[position], position)
    sock = encryption.wrap(found[position], group.position < position, group.ranks[position], attempt)
    found[position] = sock
    return SecureLink(sock, position)


def shut_down_all(sockets: Mapping[int, socket.socket]) -> None:
    """End the connections of ``sockets``, and let listeners refuse others; from any thread."""
    for sock in list(sockets.values()):
        with suppress(OSError):
            # Not the method of an encrypted socket, which would let the other thread send plain data.
            socket.socket.shutdown(sock, socket.SHUT_RDWR)


def close_all(sockets: Mapping[int, socket.socket]) -> None:
    """Close all of ``sockets``."""
    for sock in sockets.values():
        sock.close()
