"""Authenticated frames on a new connection, before it becomes one of a channel.

Both sides prove that they know the secret of the job by HMAC-SHA256 over a nonce of the other side and the payload.
No data is decoded before it is authenticated.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import struct

from collectives.api import PeerLostError
from collectives.net.attempts import ConnectAttempt

LENGTH = struct.Struct(">I")
NONCE_BYTES = 32
MAC_BYTES = 32
LARGEST_BYTES = 1 << 26
READ_BYTES = 1 << 16
REFUSAL = LENGTH.pack(0)
"""The answer to a hello without a valid proof. It proves nothing itself, so whoever reads it gives up."""


def nonce() -> bytes:
    """Bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def seal(secret: bytes, nonce: bytes, payload: bytes) -> bytes:
    """``payload`` behind the proof that its sender knows ``secret`` and has seen ``nonce``."""
    return hmac.digest(secret, nonce + payload, hashlib.sha256) + payload


def unseal(secret: bytes, nonce: bytes, sealed: bytes) -> bytes:
    """The payload; raises PeerLostError where the proof is wrong."""
    payload = sealed[MAC_BYTES:]
    if not hmac.compare_digest(sealed[:MAC_BYTES], hmac.digest(secret, nonce + payload, hashlib.sha256)):
        raise PeerLostError("the other side does not know the secret of this job, or refused this rank")
    return payload


class FrameReader:
    """Reads frames of at most ``limit`` bytes from a socket that does not block, piece by piece."""

    def __init__(self, sock: socket.socket, limit: int = LARGEST_BYTES) -> None:
        self._sock = sock
        self._limit = limit
        self._unread = bytearray()

    def read(self) -> bytes | None:
        """The next frame, None while it is incomplete; never reads past its end.

        Raises ConnectionResetError at the end of the connection, PeerLostError for a frame that is too long.
        """
        frame = self._take()
        while frame is None:
            try:
                piece = self._sock.recv(self._missing())
            except BlockingIOError:
                return None
            if not piece:
                raise ConnectionResetError("the other side closed the connection")
            self._unread += piece
            frame = self._take()
        return frame

    def _length(self) -> int | None:
        if len(self._unread) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._unread)
        if length > self._limit:
            raise PeerLostError(f"a handshake of {length} bytes is refused; at most {self._limit} are allowed")
        return int(length)

    def _missing(self) -> int:
        length = self._length()
        whole = LENGTH.size + (0 if length is None else length)
        return min(whole - len(self._unread), READ_BYTES)

    def _take(self) -> bytes | None:
        length = self._length()
        if length is None or len(self._unread) < LENGTH.size + length:
            return None
        frame = bytes(self._unread[LENGTH.size :])
        self._unread.clear()
        return frame


class Wire:
    """A new connection whose reads and writes wait, as long as ``attempt`` allows. Owns ``sock``.

    The owner may replace ``attempt``.

    Raises TimeoutError at the deadline, OSError, and the error that the attempt was aborted with.
    """

    def __init__(self, sock: socket.socket, attempt: ConnectAttempt) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.attempt = attempt
        self._reader = FrameReader(sock)

    def exactly(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        data = b""
        while len(data) < count:
            data += self._some(count - len(data))
        return data

    def _some(self, most: int) -> bytes:
        self._await(select.POLLIN)
        piece = self.sock.recv(most)
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        return piece

    def matches(self, expected: bytes) -> bool:
        """Whether the next bytes are ``expected``. Waits for no more of them where the first ones differ."""
        seen = b""
        while len(seen) < len(expected) and expected.startswith(seen):
            seen += self._some(len(expected) - len(seen))
        return seen == expected

    def receive(self) -> bytes:
        """The next frame."""
        while (frame := self._reader.read()) is None:
            self._await(select.POLLIN)
        return frame

    def send(self, data: bytes) -> None:
        """Send ``data`` as a frame."""
        unsent = memoryview(LENGTH.pack(len(data)) + data)
        while unsent:
            try:
                unsent = unsent[self.sock.send(unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._await(select.POLLOUT)

    def _await(self, event: int) -> None:
        if not self.attempt.wait({self.sock.fileno(): event}):
            raise TimeoutError("the other side did not answer in time")
