"""Rounds of votes through one member, the *hub*, for members that share cores.

A member that waits is woken by each frame that it gets. In a mesh those are as many as there are other members, and
each may cost a change of context, where ranks share cores. In a star each member but the hub sends one frame and gets
one: its vote with its short messages, and then, if all agree, the messages of the others. The frames of a round are::

    to the hub       the vote, the form of the parcel behind it, its length, and the parcel (parcels.py)
    from the hub     AGREED, the length of the message of each member, and the messages; or DIFFERS; before that, where
                     the hub waits for long, ABSENT with a mark for each member that has not voted

The hub answers DIFFERS as soon as it knows of another vote, or declines itself: no member can leave a round before.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["ABSENT", "AGREED", "DIFFERS", "HUB", "VOTE", "Answers", "riding"]

HUB = 0
"""The position of the member that all others send their votes to."""

VOTE = struct.Struct("<III")
"""The number that a member votes for, the form of its parcel, and the length of that."""
AGREED, DIFFERS, ABSENT = 1, 2, 3

MOST_PASSED_ON = 1 << 20


def riding(size: int, most: int) -> int:
    """The longest message, in bytes, that travels through the hub of ``size`` members, which sends them one by one."""
    return min(most, MOST_PASSED_ON // (size - 1) ** 2)


class Answers:
    """The frames from the hub of ``size`` members, without the messages: all have the same length."""

    def __init__(self, size: int) -> None:
        self._format = struct.Struct(f"<{1 + size}I")
        self._nothing = [0] * size

    def pack(self, kind: int, numbers: Sequence[int] = ()) -> memoryview:
        """An answer with a number for each member, by default 0."""
        return memoryview(self._format.pack(kind, *(numbers or self._nothing)))

    def room(self) -> memoryview:
        """Memory for an answer."""
        return memoryview(bytearray(self._format.size))

    def unpack(self, answer: memoryview) -> tuple[int, Sequence[int]]:
        """The kind, and the numbers."""
        kind, *numbers = self._format.unpack(answer)
        return kind, numbers
