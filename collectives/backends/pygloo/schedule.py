"""Pure: the order of messages for a library whose send and receive block until the other side is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Transfer", "in_order"]


class Transfer(NamedTuple):
    """``length`` bytes of the shared memory from ``offset`` on, to or from the member at position ``peer``."""

    peer: int
    is_send: bool
    offset: int
    length: int


def in_order(transfers: Iterable[Transfer], position: int, size: int) -> list[Transfer]:
    """The ``transfers`` of the member at ``position``, in an order in which no ``size`` members block one another.

    The members i and j meet in round (i + j) mod ``size``, so that each has one partner in a round. In a round, the
    member with the lower position sends first. This is one order for all transfers of the group, so there is always one
    that both of its members have reached. All to all takes ``size`` rounds of two messages.
    """

    def place(transfer: Transfer) -> tuple[int, bool]:
        is_of_lower = transfer.is_send == (position < transfer.peer)
        return (position + transfer.peer) % size, not is_of_lower

    return sorted(transfers, key=place)
