"""The form of the frames between a relay and rank 0: a message, and the ranks that receive it or sent it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from collectives.api import EngineError

__all__ = ["pack", "unpack"]


def pack(ranks: Sequence[int], data: bytes) -> bytes:
    """The number of ranks, the ranks (4 bytes each, big-endian), then ``data`` as it is."""
    return struct.pack(f">I{len(ranks)}I", len(ranks), *ranks) + data


def unpack(frame: bytes) -> tuple[tuple[int, ...], bytes]:
    """The opposite of :func:`pack`; EngineError for data that :func:`pack` did not make."""
    try:
        (count,) = struct.unpack_from(">I", frame)
        ranks = struct.unpack_from(f">{count}I", frame, 4)
    except struct.error as error:
        raise EngineError(f"an envelope of {len(frame)} bytes cannot be read: {error}") from None
    if not ranks:
        raise EngineError("an envelope names no rank")
    return ranks, frame[4 + 4 * count :]
