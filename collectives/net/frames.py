"""Frames, and the proof of each that its sender knows the secret of the job: for all connections. Without a socket.

A frame is a length (8 bytes, big-endian) and that many bytes. No frame of a stranger is decoded: the first one has a
proof, made by :func:`seal` from a nonce of the other side, or all have one, made by a :class:`Sealer`. For the latter
both sides send a nonce; then the side that called sends its first frame, and the other side answers, if the frame is
genuine, with its own first one. The digest covers the direction, the nonces and the number of the frame, so no frame
can be replayed, dropped or sent back unnoticed. :mod:`collectives.net.strangers` limits connections without a proof.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter  # which most ranks do not need

LENGTH = struct.Struct(">Q")
HEADER_BYTES = LENGTH.size
NONCE_BYTES = 32
DIGEST_BYTES = 32
LONGEST_HELLO = 1 << 16
"""In bytes; a peer that has proved nothing yet must not fill the memory."""
REFUSAL = LENGTH.pack(0)
"""The answer to a hello without a valid proof. It proves nothing itself, so whoever reads it gives up."""


def nonce() -> bytes:
    """Bytes that were never used before."""
    return os.urandom(NONCE_BYTES)


def digest(secret: bytes, *fields: bytes | bytearray) -> bytes:
    """The HMAC-SHA256 of ``fields``: no others give the same, because the length of each precedes it."""
    # HMAC fills a short key up with zeros: without hashing it first, b"k" and b"k\0" would be one secret.
    message = b"".join(part for field in fields for part in (LENGTH.pack(len(field)), field))
    return hmac.digest(hashlib.sha256(secret).digest(), message, "sha256")


def check_digest(given: bytes, secret: bytes, *fields: bytes | bytearray) -> None:
    """Raise PermissionError unless ``given`` is the :func:`digest` of the others."""
    if not hmac.compare_digest(given, digest(secret, *fields)):
        raise PermissionError("the other side does not know the secret of this job")


def seal(secret: bytes, nonce: bytes, content: bytes) -> bytes:
    """``content`` behind the proof that its sender knows ``secret`` and has seen ``nonce``."""
    return proof(secret, nonce, fingerprint(content)) + content


def fingerprint(content: bytes) -> bytes:
    """The SHA-256 of ``content``: for proofs to a thousand hosts, a long content is read once."""
    return hashlib.sha256(content).digest()


def proof(secret: bytes, nonce: bytes, fingerprint: bytes) -> bytes:
    """The proof alone, which :func:`seal` puts before a content with ``fingerprint``."""
    return digest(secret, nonce, fingerprint)


def unseal(secret: bytes, nonce: bytes, sealed: bytes) -> bytes:
    """The content; raises PermissionError where the proof is wrong."""
    content = sealed[DIGEST_BYTES:]
    check_digest(sealed[:DIGEST_BYTES], secret, nonce, fingerprint(content))
    return content


def frame(content: bytes) -> bytes:
    """``content`` as it travels."""
    return LENGTH.pack(len(content)) + content


def check_length(length: int, limit: int) -> None:
    """Raise PermissionError for a frame that is longer than ``limit``."""
    if length > limit:
        raise PermissionError(f"a frame of {length} bytes is refused; at most {limit} are allowed")


class Frames:
    """Cuts a stream of bytes into the contents of frames, of at most ``limit`` bytes each."""

    def __init__(self, limit: int = sys.maxsize) -> None:
        self._limit = limit
        self._unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that ``data`` completes. Raises PermissionError for one that is too long."""
        if not self._unread:
            found, end = self._cut(data)
            self._unread += data[end:]
            return found
        self._unread += data
        with memoryview(self._unread) as whole:
            found, end = self._cut(whole)
        del self._unread[:end]
        return found

    def _cut(self, data: bytes | memoryview) -> tuple[list[bytes], int]:
        """The whole frames in ``data``, and their end."""
        found, start, size = [], 0, len(data)
        while size >= start + HEADER_BYTES:
            (length,) = LENGTH.unpack_from(data, start)
            if length > self._limit:
                check_length(length, self._limit)
            stop = start + HEADER_BYTES + length
            if size < stop:
                break
            found.append(bytes(data[start + HEADER_BYTES : stop]))
            start = stop
        return found, start

    @property
    def missing(self) -> int:
        """The bytes that certainly belong to the frame that has begun, and have not come."""
        length = LENGTH.unpack_from(self._unread)[0] if len(self._unread) >= HEADER_BYTES else 0
        return int(HEADER_BYTES + length - len(self._unread))


def keys(secret: bytes, caller_nonce: bytes, listener_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of the frames of the side that has called, and of those of the other side."""
    caller, listener = (digest(secret, side, caller_nonce, listener_nonce) for side in (b"caller", b"listener"))
    return caller, listener


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """The next frame."""
        sealed = seal(self._key, LENGTH.pack(self._number), content)
        self._number += 1
        return frame(sealed)


class Opener:
    """Takes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._frames = Frames()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents of the frames that ``data`` completes. Raises PermissionError for a forged one."""
        return map(self.open, self._frames.feed(data))

    def open(self, sealed: bytes) -> bytes:
        """The content of the next frame, without its length. Raises PermissionError if it is forged."""
        content = unseal(self._key, LENGTH.pack(self._number), sealed)
        self._number += 1
        return content


class Admitted(NamedTuple):
    """A peer that knows the secret, the content of its first frame, and the two directions of its connection."""

    hello: bytes
    opener: Opener
    sealer: Sealer


async def admit(reader: StreamReader, writer: StreamWriter, secret: bytes) -> Admitted:
    """Wait for the first frame of a caller. Raises an OSError or EOFError for one that is not genuine."""
    own = nonce()
    writer.write(own)
    incoming, outgoing = keys(secret, await reader.readexactly(NONCE_BYTES), own)
    opener = Opener(incoming)
    return Admitted(opener.open(await read_frame(reader)), opener, Sealer(outgoing))


async def read_frame(reader: StreamReader, limit: int = LONGEST_HELLO) -> bytes:
    """The next frame. Raises PermissionError if it is too long, OSError, and EOFError."""
    (length,) = LENGTH.unpack(await reader.readexactly(HEADER_BYTES))
    check_length(length, limit)
    return await reader.readexactly(length)
