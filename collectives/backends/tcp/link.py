"""The connection to one other member: the data that it still sends, and the memory for the data that it receives."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import TypeAlias

from collectives.api import override
from collectives.backends.host import Array

MOST_VIEWS = 256
"""Pieces of memory in one call; the kernel takes 1024 at most."""

MOST_RECEIVED = 1 << 22
"""Bytes of one step, or little more: the other links, an abort and the engine have their turn meanwhile."""

PARTING = b"\0"
WITHIN_HOST = 1 << 19
"""Bytes that the kernel keeps for a member of the same host: more would not stay in the cache on the way."""

Script: TypeAlias = Iterator["memoryview | None"]
"""Gives the memory for the next bytes when the last bytes are in place; None while it has none."""


class TcpLink:
    """Sends and receives without waiting, and without a header: both ends know all lengths. Owns ``sock``.

    ``position`` is that of the other member.
    """

    hides_data = False
    """Whether data that has come may lie in this process, where it does not wake a member that sleeps."""

    def __init__(self, sock: socket.socket, position: int) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel must not end the connection to a member that computes for long, and does not read meanwhile.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        if _is_within_host(sock):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WITHIN_HOST)
        self.position = position
        self.descriptor = sock.fileno()
        self._socket = sock
        self._unsent: deque[memoryview] = deque()
        self._scripts: deque[Script] = deque()
        self._target: memoryview | None = None
        self.is_sending = False
        """Whether data is still to be sent."""
        self.is_receiving = False
        """Whether data of some script is still to come."""
        self.has_received = False
        """Whether some of it has come."""
        self.has_parted = False
        """Whether the other member has closed its end after all that it had to send: no loss."""

    @property
    def can_receive(self) -> bool:
        """Whether there is memory for the next bytes."""
        return self._target is not None

    def send(self, views: Iterable[memoryview]) -> None:
        """Send ``views``, none of them empty, after all data before. :meth:`step` does it."""
        self._unsent.extend(views)
        self.is_sending = bool(self._unsent)

    def receive(self, script: Script) -> None:
        """Receive into the memory that ``script`` gives, after that of the scripts before. :meth:`step` does it."""
        self._scripts.append(script)
        self.is_receiving, self.has_received = True, False

    def give_up(self, is_filling: bool) -> None:
        """Nobody wants the operation any more, but its bytes keep their place in the order of all bytes.

        Those to be sent are copied, because their owner may change or free the memory. If the present memory
        ``is_filling`` with data, the rest of that goes elsewhere.
        """
        self._unsent = deque(memoryview(bytes(view)) for view in self._unsent)
        if is_filling and self._target is not None:
            self._target = memoryview(bytearray(len(self._target)))

    def step(self) -> bool:
        """Send and receive as much as the kernel accepts and has; returns whether that was anything. Raises OSError."""
        has_sent = self.is_sending and self._push()
        return (self.is_receiving and self._pull()) or has_sent

    def forget(self) -> None:
        """Let go of all memory."""
        self._unsent.clear()
        self._scripts.clear()
        self._target, self.is_sending, self.is_receiving = None, False, False

    def check_end(self) -> None:
        """Call this when the other end has hung up: ConnectionResetError, unless it said :meth:`part` before."""
        if not socket.socket.recv(self._socket, 1, socket.MSG_PEEK):
            raise ConnectionResetError("the other side closed the connection")
        self.has_parted = True

    def part(self) -> None:
        """Say that this member has nothing to send any more: one byte, which no operation receives."""
        with suppress(OSError):
            self._socket.send(PARTING, socket.MSG_NOSIGNAL)

    def shut_down(self) -> None:
        """End the connection for both members, from any thread."""
        with suppress(OSError):  # it has ended already
            # Not the method of an encrypted socket, which would let the other thread send plain data.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the descriptor."""
        self.forget()
        self._socket.close()

    def _push(self) -> bool:
        try:
            sent = self._send_some()
        except BlockingIOError:
            return False
        while sent:
            first = self._unsent[0]
            if sent < len(first):
                self._unsent[0] = first[sent:]
                break
            sent -= len(first)
            self._unsent.popleft()
        self.is_sending = bool(self._unsent)
        return True

    def _send_some(self) -> int:
        if len(self._unsent) == 1:
            return self._socket.send(self._unsent[0], socket.MSG_NOSIGNAL)
        return self._socket.sendmsg(islice(self._unsent, MOST_VIEWS), (), socket.MSG_NOSIGNAL)

    def _receive_some(self, target: memoryview) -> int:
        return self._socket.recv_into(target)

    def _pull(self) -> bool:
        """Fill the memory as far as data is here. The script runs between two pieces of memory."""
        received = 0
        while (target := self._target or self._next_target()) is not None and received < MOST_RECEIVED:
            try:
                count = self._receive_some(target)
            except BlockingIOError:
                break
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            received += count
            self.has_received = True
            self._target = target[count:] if count < len(target) else None
        return received > 0 or not self.is_receiving  # the end of a script counts: it may be all that was left

    def _next_target(self) -> memoryview | None:
        scripts = self._scripts
        while scripts:
            try:
                self._target = next(scripts[0])
                break
            except StopIteration:
                scripts.popleft()
        self.is_receiving = bool(scripts)
        return self._target


def _is_within_host(sock: socket.socket) -> bool:
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # the other member has gone, which the first operation reports
        return False


def memory(array: Array) -> memoryview:
    """The bytes of ``array``."""
    return array.view("u1").data


WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
MOST_BYTES = 1 << 18
"""Of one call, which tells nothing before all of them have gone: a member that sends for long would look silent."""


class SecureLink(TcpLink):
    """A :class:`TcpLink`. The data is copied once more on each side."""

    hides_data = True

    def __init__(self, sock: ssl.SSLSocket, position: int) -> None:
        super().__init__(sock, position)
        self._secure = sock

    @override
    def part(self) -> None:
        with suppress(OSError):
            self._secure.send(PARTING)

    def _send_some(self) -> int:
        try:
            return self._secure.send(self._unsent[0][:MOST_BYTES])  # after a wait the same bytes: TLS insists on it
        except WAITS:
            raise BlockingIOError from None

    def _receive_some(self, target: memoryview) -> int:
        try:
            return self._secure.recv_into(target)
        except WAITS:
            raise BlockingIOError from None
