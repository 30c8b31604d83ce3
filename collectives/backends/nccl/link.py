"""What a backend has once its members have connected, and how it gets there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from collectives.backends.nccl.device import Device
from collectives.backends.nccl.library import Communicator, Library, Pause

__all__ = ["Connect", "Link"]


class Link(NamedTuple):
    """A communicator, the library that it belongs to, and the GPU on which it works."""

    library: Library
    device: Device
    communicator: Communicator


Connect: TypeAlias = Callable[[int, Pause], Link]
"""Connects the members of a group; the argument is the address of a tensor on the GPU to use, or 0. See
:meth:`Library.connect` for the other one and for the errors."""
