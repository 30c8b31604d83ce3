"""The transport over TCP: all collectives in as few copies as the kernel allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from collectives.api import override
from collectives.backends.base import Call, Group, OnMissing, OnWait, Vote
from collectives.backends.host import Array, Bytes, Workspace
from collectives.backends.phases import phase
from collectives.backends.tcp.ballot import Ballot, BallotDisagreement, Views
from collectives.backends.tcp.link import Script, TcpLink, memory
from collectives.backends.tcp.mesh import Mesh
from collectives.backends.tcp.pump import Pump
from collectives.backends.tcp.reducing import Data, SliceReduction, scratch_shape
from collectives.backends.tcp.star import HUB, Hub, Spoke
from collectives.backends.transport import Message, PointToPoint, by_member
from collectives.kernels.reduction import ReductionKernel

CHAIN = 1 << 17
CHAIN_PIECE = 1 << 17
"""Bytes: from this length on a broadcast goes from member to member, in pieces of this length."""


class TcpTransport(PointToPoint):
    """A member of ``group`` with ``links`` to all others, by position, which it owns.

    ``timeout`` bounds a silence of the other members, in seconds. ``crowded``: the host has more ranks than cores.
    ``in_star``: the members vote through one of them, see :mod:`collectives.backends.tcp.star`.
    """

    name = "tcp"

    def __init__(
        self, group: Group, links: Mapping[int, TcpLink], timeout: float, crowded: bool, in_star: bool = False
    ) -> None:
        self._links = links
        self._pump = Pump(group, links.values(), timeout, crowded)
        self.ballot: Ballot = _kind_of_ballot(group, in_star)(group, links, self._pump)
        """The votes of this member."""
        self._scratch = Workspace()
        super().__init__(group)

    @property
    @override
    def on_wait(self) -> OnWait:
        return self._pump.on_wait

    @on_wait.setter
    def on_wait(self, call: OnWait) -> None:
        self._pump.on_wait = call

    @override
    def check(self) -> None:
        """A question for the others is answered before anything else happens."""
        self._pump.check()
        if self.ballot.is_asking:
            self.trade({}, {})

    @override
    def enter(self) -> None:
        """The first call is :meth:`trade`, which carries the question."""
        self._pump.check()

    def trade(self, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool = False) -> None:
        """At most one message to and from each other member, by position, all at once; the parts are not empty.

        No incoming memory is written before all members run the operation, unless it is ``spare``.
        """
        if self.ballot.is_asking:
            outgoing, incoming = self.ballot.carry(outgoing, incoming, spare)
            if not (outgoing or incoming):
                return
        for position, views in incoming.items():
            self._links[position].receive(iter(views))
        for position, views in outgoing.items():
            self._links[position].send(views)
        self._pump.run()

    @override
    def exchange(self, outgoing: Sequence[Message], incoming: Sequence[Message]) -> None:
        self.trade(
            {position: (data.data,) for position, data in outgoing},
            {position: (data.data,) for position, data in incoming},
        )

    @phase("exchange")
    def spread(self, source: Sequence[Bytes], targets: Mapping[int, Sequence[Bytes]], spare: bool = False) -> None:
        """Send all of ``source`` to every other member, and receive into ``targets[position]`` from each of them.

        The parts are not empty. ``spare`` is that of :meth:`trade`.
        """
        views = list(map(memory, source))
        self.trade(dict.fromkeys(self._links, views), _views(targets), spare)

    @phase("exchange")
    def swap(self, source: Mapping[int, Sequence[Array]], targets: Mapping[int, Sequence[Array]]) -> None:
        """As :meth:`spread`, with data of its own for each other member, into memory that is spare."""
        self.trade(_views(source), _views(targets), spare=True)

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        size, here = self.group.size, self.group.position
        outgoing, incoming = by_member(source, send_counts, size), by_member(destination, receive_counts, size)
        self.trade(
            {other: (outgoing[other].data,) for other in self._links if outgoing[other].size},
            {other: (incoming[other].data,) for other in self._links if incoming[other].size},
        )
        incoming[here][:] = outgoing[here]

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        """Long data goes along a chain in pieces: each member sends S bytes at most.

        Where members vote anyway, short data travels with the vote of the root.
        """
        if self.ballot.is_asking:
            if data.size <= self.ballot.riding:
                self._broadcast_at_once(data, root)
                return
            self.check()
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

    def _broadcast_at_once(self, data: Bytes, root: int) -> None:
        views = (data.data,)
        if self.group.position == root:
            self.trade(dict.fromkeys(self._links, views), {})
        else:
            self.trade({}, {root: views})

    @override
    def barrier(self) -> None:
        if self.ballot.is_asking:
            self.check()  # all votes are there when all members are
        else:
            super().barrier()

    @phase("exchange")
    def reduce(self, data: Data, how: ReductionKernel) -> None:
        """Reduce ``data`` in a pipeline: 2 steps, 2 S (P - 1) / P bytes; half of both where only slices are wanted."""
        shape = scratch_shape(self.group.size, how.dtype.itemsize)
        scratch = self._scratch.take(math.prod(shape), how.dtype).reshape(shape)
        SliceReduction(self.group.position, self._links, data, how, scratch).begin()
        with np.errstate(all="ignore"):
            self._pump.run()

    @override
    def close(self) -> None:
        self._pump.close()

    @override
    def abort(self, error: Exception) -> None:
        self._pump.abort(error)


def _kind_of_ballot(group: Group, in_star: bool) -> type[Mesh | Hub | Spoke]:
    if not in_star:
        return Mesh
    return Hub if group.position == HUB else Spoke


def _views(arrays: Mapping[int, Sequence[Array]]) -> dict[int, Views]:
    return {position: list(map(memory, parts)) for position, parts in arrays.items()}


def _passed_on(views: Sequence[memoryview], link: TcpLink | None) -> Script:
    """Receive ``views``, and send each of them over ``link``."""
    for view in views:
        yield view
        if link is not None:
            link.send((view,))


class TcpVote(Vote):
    """The first exchange of an operation carries the values. Before it, an operation writes to no destination."""

    def __init__(self, transport: TcpTransport) -> None:
        self._transport = transport
        self._ballot = transport.ballot

    @override
    def attempt(self, value: int, call: Call, waiting: OnMissing, agreed: Call) -> bool:
        self._ballot.ask(value, waiting, agreed)
        try:
            call()
            self._transport.check()  # if the operation had nothing to exchange
        except BallotDisagreement:
            return False
        finally:
            self._ballot.withdraw()
        return True

    @override
    def decline(self) -> None:
        self._ballot.decline()

    @override
    def hurry(self) -> None:
        self._ballot.flush()
