"""The offers of the members of a Gloo group. All members need one binding of Gloo: the wires of two may differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from collectives.api import SettingsError
from collectives.backends.group import Group

__all__ = ["pack_offer", "unpack_offers"]


def pack_offer(binding: str, *parts: bytes) -> bytes:
    """The offer of a member that uses ``binding``: torch or pygloo."""
    offer: bytes = msgpack.packb((binding, *parts))
    return offer


def unpack_offers(binding: str, offers: Sequence[bytes], group: Group) -> list[list[Any]]:
    """The parts of each member's offer, by position. Raises SettingsError where a member has another binding."""
    found = [msgpack.unpackb(offer) for offer in offers]
    for position, (theirs, *_) in enumerate(found):
        if theirs != binding:
            raise SettingsError(
                f"this rank uses Gloo through {binding}, but {group.describe([position])} through {theirs}; install "
                "the same packages on all hosts, or set HOROVOD_CPU_OPERATIONS=pygloo"
            )
    return [parts for _, *parts in found]
