"""The first words of a connection to a server that only those who know the secret may use."""

from __future__ import annotations

import os
from asyncio import StreamReader, StreamWriter
from typing import NamedTuple

from executors.api import JobSecret
from executors.hosts.link import LONGEST_HELLO, NONCE_BYTES, Opener, Sealer, keys
from executors.local.frames import Frames

__all__ = ["Admitted", "admit"]


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
