"""An authenticated connection: frames, each of which proves that its sender knows the secret, and the first of them.

Both sides send a nonce. The agent sends its first frame then, and the driver answers, if the frame is genuine, with its
own first one. A frame is its length, a digest, and the content. The digest covers the direction, the nonces and the
number of the frame, so no frame can be replayed, dropped or sent back unnoticed.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from executors.api import JobSecret

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter  # which a worker that only reads frames does not need


class Frames:
    """Cuts a stream of bytes into messages, each after its length in eight bytes."""

    HEADER = 8

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that ``data`` completes."""
        self._buffer += data
        while (end := self._end()) is not None:
            message = bytes(memoryview(self._buffer)[self.HEADER : end])
            del self._buffer[:end]
            yield message

    def _end(self) -> int | None:
        if len(self._buffer) < self.HEADER:
            return None
        end = self.HEADER + int.from_bytes(self._buffer[: self.HEADER], "big")
        return end if len(self._buffer) >= end else None

    @classmethod
    def header(cls, message: bytes) -> bytes:
        """The header that precedes ``message``."""
        return len(message).to_bytes(cls.HEADER, "big")


NONCE_BYTES = 32
DIGEST_BYTES = 32
LONGEST_HELLO = 1 << 16
"""In bytes; a peer that has proved nothing yet must not fill the memory."""


def keys(secret: JobSecret, agent_nonce: bytes, driver_nonce: bytes) -> tuple[bytes, bytes]:
    """The keys of the frames of the agent, and of those of the driver."""
    nonces = agent_nonce + driver_nonce
    agent, driver = (hmac.digest(secret.key, b"hvd " + side + nonces, "sha256") for side in (b"agent", b"driver"))
    return agent, driver


class Sealer:
    """Makes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, content: bytes) -> bytes:
        """The next frame."""
        digest = _digest(self._key, self._number, content)
        self._number += 1
        return Frames.header(digest + content) + digest + content


class Opener:
    """Takes the frames of one direction."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self._frames = Frames()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The contents of the frames that ``data`` completes. Raises PermissionError for a forged one."""
        return map(self.open, self._frames.feed(data))

    def open(self, body: bytes) -> bytes:
        """The content of the next frame, without its length. Raises PermissionError if it is forged."""
        digest, content = body[:DIGEST_BYTES], body[DIGEST_BYTES:]
        if not hmac.compare_digest(digest, _digest(self._key, self._number, content)):
            raise PermissionError("the peer does not know the secret of the job")
        self._number += 1
        return content


def _digest(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.new(key, number.to_bytes(8, "big") + content, hashlib.sha256).digest()


class Admitted(NamedTuple):
    """A peer that knows the secret, the content of its first frame, and the two directions of its connection."""

    hello: bytes
    opener: Opener
    sealer: Sealer


async def admit(reader: StreamReader, writer: StreamWriter, secret: JobSecret) -> Admitted:
    """Wait for the first frame of the peer. Raises an OSError, EOFError or ValueError for one that is not genuine."""
    nonce = os.urandom(NONCE_BYTES)
    writer.write(nonce)
    incoming, outgoing = keys(secret, await reader.readexactly(NONCE_BYTES), nonce)
    size = int.from_bytes(await reader.readexactly(Frames.HEADER), "big")
    if size > LONGEST_HELLO:
        raise ValueError(f"its first message has {size} bytes")
    opener = Opener(incoming)
    return Admitted(opener.open(await reader.readexactly(size)), opener, Sealer(outgoing))
