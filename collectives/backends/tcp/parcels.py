"""The messages of one member to the others, packed for the member that passes them on."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from collectives.backends.tcp.ballot import Views, length_of

__all__ = ["EACH", "SAME", "Parcel", "pack"]

EACH, SAME = 0, 1
"""How a parcel begins: with the lengths of the messages to each member, or with one message to all others."""


def pack(messages: Mapping[int, Views], size: int, position: int) -> tuple[int, Sequence[memoryview]]:
    """How the parcel begins, and its parts: the messages of the member at ``position`` of ``size`` members."""
    if not messages:
        return EACH, ()
    first = next(iter(messages.values()))
    if len(messages) == size - 1 and all(views is first for views in messages.values()):
        return SAME, first
    found = [messages.get(other, ()) for other in range(size)]
    lengths = memoryview(_lengths(size).pack(*map(length_of, found)))
    return EACH, [lengths, *(view for views in found for view in views)]


class Parcel:
    """The ``content`` that :func:`pack` made, on the side of the member that passes it on."""

    def __init__(self, form: int, content: memoryview, size: int) -> None:
        self._whole = content if form == SAME else None
        self._parts: Sequence[memoryview] = ()
        if form == EACH and content:
            lengths = _lengths(size)
            ends = accumulate(lengths.unpack_from(content), initial=lengths.size)
            self._parts = [content[start:end] for start, end in pairwise(ends)]

    def to(self, position: int) -> memoryview:
        """The message to the member at ``position``, which may be empty."""
        if self._whole is not None:
            return self._whole
        return self._parts[position] if self._parts else memoryview(b"")


def _lengths(size: int) -> struct.Struct:
    return struct.Struct(f"<{size}I")
