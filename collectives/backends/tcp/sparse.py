"""The transport of a large group: a member has links to those only with which an operation has exchanged data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from collectives.api import override
from collectives.backends.base import Group
from collectives.backends.host import Bytes
from collectives.backends.tcp.ballot import Views
from collectives.backends.tcp.link import TcpLink
from collectives.backends.tcp.reducing import Data
from collectives.backends.tcp.switchboard import Switchboard
from collectives.backends.tcp.transport import CHAIN, TcpTransport
from collectives.kernels.reduction import ReductionKernel


class SparseTransport(TcpTransport):
    """As :class:`TcpTransport`, without votes; ``switchboard``, which it owns, makes the links.

    An operation opens the links that it needs before its data moves. So two members that need one have ended all
    operations before when both are there, or will, without this link. The end of a member that has yet to call is known
    to the control channel only, which aborts the others.
    """

    def __init__(self, group: Group, switchboard: Switchboard, timeout: float, crowded: bool) -> None:
        self._opened: dict[int, TcpLink] = {}
        self._switchboard = switchboard
        super().__init__(group, self._opened, timeout, crowded)
        self._pump.on_end = switchboard.shut_down

    @override
    def trade(self, outgoing: Mapping[int, Views], incoming: Mapping[int, Views], spare: bool = False) -> None:
        self._reach(outgoing.keys() | incoming.keys())
        super().trade(outgoing, incoming, spare)

    @override
    def spread(self, source: Sequence[Bytes], targets: Mapping[int, Sequence[Bytes]], spare: bool = False) -> None:
        self._reach(self.group.others)
        super().spread(source, targets, spare)

    @override
    def alltoall(
        self, source: Bytes, destination: Bytes, send_counts: Sequence[int] = (), receive_counts: Sequence[int] = ()
    ) -> None:
        self._reach(_partners(self.group, send_counts, receive_counts))
        super().alltoall(source, destination, send_counts, receive_counts)

    @override
    def broadcast(self, data: Bytes, root: int) -> None:
        if data.size >= CHAIN:
            size, here = self.group.size, self.group.position
            self._reach({(here - 1) % size, (here + 1) % size})
        super().broadcast(data, root)

    @override
    def reduce(self, data: Data, how: ReductionKernel) -> None:
        self._reach(self.group.others)
        super().reduce(data, how)

    @override
    def close(self) -> None:
        super().close()
        self._switchboard.close()

    def _reach(self, positions: Collection[int]) -> None:
        """Have links to the members at ``positions``. Raises the errors of an operation."""
        missing = [position for position in positions if position not in self._opened]
        if not missing:
            return
        try:
            for link in self._switchboard.open(missing, self._pump.tend):
                self._opened[link.position] = link
                self._pump.add(link)
        except Exception as error:
            reason = self._pump.fail(error)
            if reason is error:
                raise
            raise reason from error


def _partners(group: Group, send_counts: Sequence[int], receive_counts: Sequence[int]) -> list[int]:
    """The members with which an alltoall exchanges data: without counts all others."""
    if not send_counts:
        return group.others
    return [other for other in group.others if send_counts[other] or receive_counts[other]]
