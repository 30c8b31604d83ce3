"""The transport over TCP: all collectives in as few copies as the kernel allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from collectives.api import DType
from collectives.backends.base import OnWait
from collectives.backends.group import Group
from collectives.backends.host import Bytes
from collectives.backends.phases import phase
from collectives.backends.tcp.link import Link, Script, memory
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.reducing import Data, SliceReduction, scratch_shape
from collectives.backends.transport import Message, PointToPoint
from collectives.backends.workspace import Workspace
from collectives.kernels.reduction import Reduction

__all__ = ["TcpTransport"]

CHAIN = 1 << 17
CHAIN_PIECE = 1 << 17
"""Bytes: from this length on a broadcast goes from member to member, in pieces of this length."""


class TcpTransport(PointToPoint):
    """A member of ``group`` with ``links`` to all others, by position, which it owns.

    ``timeout`` bounds a silence of the other members, in seconds. ``crowded``: the host has more ranks than cores.
    """

    name = "tcp"

    def __init__(self, group: Group, links: Mapping[int, Link], timeout: float, crowded: bool) -> None:
        self._links = links
        self._pump = Pump(group, list(links.values()), timeout, crowded)
        self._scratch = Workspace()
        super().__init__(group)

    @property
    def on_wait(self) -> OnWait:
        """See :class:`Transport`."""
        return self._pump.on_wait

    @on_wait.setter
    def on_wait(self, call: OnWait) -> None:
        self._pump.on_wait = call

    def check(self) -> None:
        """See :class:`Transport`."""
        self._pump.check()

    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        """See :class:`PointToPoint`."""
        for position, data in incoming:
            self._links[position].receive(iter((data.data,)))
        for position, data in outgoing:
            self._links[position].send((data.data,))
        self._pump.run()

    @phase("exchange")
    def spread(self, source: Sequence[Bytes], targets: Mapping[int, Sequence[Bytes]]) -> None:
        """Send all of ``source`` to every other member, and receive into ``targets[position]`` from each of them.

        The parts are not empty.
        """
        views = list(map(memory, source))
        for position, link in self._links.items():
            link.receive(map(memory, targets[position]))
            link.send(views)
        self._pump.run()

    def broadcast(self, data: Bytes, root: int) -> None:
        """See :class:`Transport`. Long data goes along a chain in pieces: each member sends S bytes at most."""
        if self.group.size <= 2 or data.size < CHAIN:
            super().broadcast(data, root)
            return
        size, here = self.group.size, self.group.position
        before, after = (here - 1) % size, (here + 1) % size
        views = [data[start : start + CHAIN_PIECE].data for start in range(0, data.size, CHAIN_PIECE)]
        if here == root:
            self._links[after].send(views)
        else:
            self._links[before].receive(_passed_on(views, None if after == root else self._links[after]))
        self._pump.run()

    @phase("exchange")
    def reduce(self, data: Data, dtype: DType, how: Reduction) -> None:
        """Reduce ``data`` in a pipeline: 2 steps, 2 S (P - 1) / P bytes; half of both where only slices are wanted."""
        shape = scratch_shape(self.group.size, dtype.itemsize)
        scratch = self._scratch.take(math.prod(shape), dtype).reshape(shape)
        SliceReduction(self.group.position, self._links, data, how, scratch).begin()
        with np.errstate(all="ignore"):
            self._pump.run()

    def close(self) -> None:
        """See :class:`Transport`."""
        self._pump.close()

    def abort(self, error: Exception) -> None:
        """See :class:`Transport`."""
        self._pump.abort(error)


def _passed_on(views: Sequence[memoryview], link: Link | None) -> Script:
    """Receive ``views``, and send each of them over ``link``."""
    for view in views:
        yield view
        if link is not None:
            link.send((view,))
