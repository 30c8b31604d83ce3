"""The result of the handshake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from collectives.control.sockets import SocketChannel

__all__ = ["Connected", "Offer"]

Offer: TypeAlias = Callable[[tuple[str, ...], int], bytes]
"""The host of each rank, and the cores that the ranks of this host share -> the addresses that this rank offers."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A channel to the other ranks, and their answers.

    ``hosts[r]`` is the host of rank ``r``, ``offers[r]`` its offer. ``cores`` is the number of distinct cores that the
    ranks of this rank's host may use; it is the same on all of them. ``start`` is the number of this start of the
    world.
    """

    channel: SocketChannel
    hosts: tuple[str, ...]
    cores: int
    offers: tuple[bytes, ...]
    start: int
