"""The side of a connection that reads and writes frames itself, with its socket, while the connection is new."""

from __future__ import annotations

import math
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from collectives.api import PeerLostError
from collectives.net.attempts import ConnectAttempt
from collectives.net.frames import (
    HEADER_BYTES,
    LENGTH,
    LONGEST_HELLO,
    NONCE_BYTES,
    Frames,
    Opener,
    Sealer,
    check_length,
    frame,
    keys,
    nonce,
)

LONGEST_ANSWER = 1 << 26
READ_BYTES = 1 << 16


class Wire:
    """A new connection, before it becomes one of a channel: reads never go past the end of a frame. Owns ``sock``.

    :meth:`read` returns at once. The other methods wait, as long as ``attempt`` allows, which the owner may replace.
    They raise TimeoutError at the deadline, OSError, and the error that the attempt was aborted with.
    """

    def __init__(self, sock: socket.socket, attempt: ConnectAttempt, limit: int = LONGEST_ANSWER) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.attempt = attempt
        self._frames = Frames(limit)

    def read(self) -> bytes | None:
        """The next frame, None while it is incomplete.

        Raises ConnectionResetError at the end of the connection, PeerLostError for a frame that is too long.
        """
        found: list[bytes] = []
        while not found:
            try:
                found = self._frames.feed(self._some(self._frames.missing))
            except BlockingIOError:
                return None
            except PermissionError as error:
                raise PeerLostError(str(error)) from error
        return found[0]

    def receive(self) -> bytes:
        """The next frame."""
        while (content := self.read()) is None:
            self._await(select.POLLIN)
        return content

    def exactly(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        data = b""
        while len(data) < count:
            self._await(select.POLLIN)
            data += self._some(count - len(data))
        return data

    def matches(self, expected: bytes) -> bool:
        """Whether the next bytes are ``expected``. Waits for no more of them where the first ones differ."""
        seen = b""
        while len(seen) < len(expected) and expected.startswith(seen):
            self._await(select.POLLIN)
            seen += self._some(len(expected) - len(seen))
        return seen == expected

    def send(self, content: bytes) -> None:
        """Send ``content`` as a frame."""
        unsent = memoryview(frame(content))
        while unsent:
            try:
                unsent = unsent[self.sock.send(unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._await(select.POLLOUT)

    def send_some(self, unsent: Sequence[memoryview]) -> list[memoryview]:
        """Send as much of ``unsent`` as the other side can take now; returns the rest. Raises OSError."""
        try:
            sent = self.sock.sendmsg(unsent, (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        rest = []
        for view in unsent:
            rest += [view[sent:]] if sent < len(view) else []
            sent = max(0, sent - len(view))
        return rest

    def _some(self, most: int) -> bytes:
        piece = self.sock.recv(min(most, READ_BYTES))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        return piece

    def _await(self, event: int) -> None:
        if not self.attempt.wait({self.sock.fileno(): event}):
            raise TimeoutError("the other side did not answer in time")


def send_together(
    wires: Mapping[int, Wire], attempt: ConnectAttempt, content: bytes, prefix: Callable[[int], bytes]
) -> list[int]:
    """Send each of ``wires`` a frame of its ``prefix(key)`` and ``content``; a slow one keeps no other waiting.

    Returns the keys of those that could not take it in time. A connection that breaks is left to its owner. Raises the
    error that ``attempt`` was aborted with.
    """
    unsent: dict[int, tuple[int, list[memoryview]]] = {}
    poller = select.poll()
    for key, wire in wires.items():
        begin = prefix(key)
        header = LENGTH.pack(len(begin) + len(content))
        unsent[wire.sock.fileno()] = key, [memoryview(header + begin), memoryview(content)]
        poller.register(wire.sock, select.POLLOUT)
    while unsent and (ready := attempt.poll(poller, math.inf)):
        for descriptor in unsent.keys() & set(ready):
            key, rest = unsent[descriptor]
            rest = _rest_after(wires[key], rest)
            unsent[descriptor] = key, rest
            if not rest:
                del unsent[descriptor]
                poller.unregister(descriptor)
    return [key for key, _ in unsent.values()]


def _rest_after(wire: Wire, unsent: Sequence[memoryview]) -> list[memoryview]:
    """The rest that :meth:`Wire.send_some` returns; nothing where the connection is broken."""
    try:
        return wire.send_some(unsent)
    except OSError:
        return []


def introduce(
    sock: socket.socket, secret: bytes, hello: bytes, end: str, deadline: float = math.inf
) -> tuple[Sealer, Opener]:
    """Send ``hello`` as the first frame to the listener that ``sock`` has called; the reverse of :func:`admit`.

    Raises OSError; ConnectionAbortedError with the text ``end`` if the listener closes the connection.
    """
    own = nonce()
    sock.sendall(own)
    outgoing, incoming = keys(secret, own, receive(sock, NONCE_BYTES, end, deadline))
    sealer = Sealer(outgoing)
    sock.sendall(sealer.seal(hello))
    return sealer, Opener(incoming)


def receive_frame(sock: socket.socket, end: str, limit: int = LONGEST_HELLO, deadline: float = math.inf) -> bytes:
    """The next frame, of ``limit`` bytes at most. Raises the errors of :func:`receive`, and PermissionError."""
    (length,) = LENGTH.unpack(receive(sock, HEADER_BYTES, end, deadline))
    check_length(length, limit)
    return receive(sock, length, end, deadline)


def receive(sock: socket.socket, size: int, end: str, deadline: float = math.inf) -> bytes:
    """The next ``size`` bytes. Raises ConnectionAbortedError with the text ``end`` if the connection ends before.

    Raises TimeoutError after the ``deadline``, in monotonic seconds; the timeout of ``sock`` is only that of a silence.
    """
    data = b""
    while len(data) < size:
        if deadline < math.inf:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other side did not answer in time")
            sock.settimeout(left)
        piece = sock.recv(size - len(data))
        if not piece:
            raise ConnectionAbortedError(end)
        data += piece
    return data
