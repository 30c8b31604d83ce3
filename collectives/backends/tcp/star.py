"""Rounds of votes through one member, the *hub*, for members that share cores.

A member that waits is woken by each frame that it gets. In a mesh those are as many as there are other members, and
each may cost a change of context, where ranks share cores. In a star each member but the hub sends one frame and gets
one: its vote with its short messages, and then, if all agree, the messages of the others. The frames of a round are::

    to the hub       the vote, the form of the parcel behind it, its length, and the parcel (parcels.py)
    from the hub     AGREED, with the messages for that member, in the order of their senders; or DIFFERS; before
                     that, where the hub waits for long, ABSENT with the positions of the members that have not voted

The hub answers DIFFERS as soon as it knows of another vote, or declines itself: no member can leave a round before.
"""

from __future__ import annotations

import struct

__all__ = ["ABSENT", "AGREED", "ANSWER", "DIFFERS", "HUB", "VOTE", "riding"]

HUB = 0
"""The position of the member that all others send their votes to."""

VOTE = struct.Struct("<III")
"""The number that a member votes for, the form of its parcel, and the length of that."""
ANSWER = struct.Struct("<II")
"""Of the hub: the kind, and the length of the data behind it."""
AGREED, DIFFERS, ABSENT = 1, 2, 3

MOST_PASSED_ON = 1 << 20


def riding(size: int, most: int) -> int:
    """The longest message, in bytes, that travels through the hub of ``size`` members, which sends them one by one."""
    return min(most, MOST_PASSED_ON // (size - 1) ** 2)
