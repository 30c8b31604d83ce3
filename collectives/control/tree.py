"""The channels of a job whose hosts have relays: for rank 0, for the rank that runs a relay, for the others there.

Messages go through the relay, so that rank 0 talks to hosts. The end of a process is detected more directly: each rank
keeps its own connection to rank 0, its *lifeline*. Both ends watch it. So the kernel reports to rank 0 which process
died or fell silent, and to each rank the same about rank 0, regardless of the state of the relay. The lifeline carries
messages only where a rank waits for so long that the process of the relay may be stopped; the watch threads read them.

A closing channel hangs up towards the relay first, and on the lifelines when the relay has hung up in answer: then all
messages are on their way. So a rank that sent the reason for its end is not reported dead before the reason arrives.
A reason that went over the lifelines, too, needs no such wait: it arrives before their end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from collectives.api import EngineError
from collectives.control import envelope
from collectives.control.relay import Relay
from collectives.control.sockets import Connection, SocketChannel

__all__ = ["Center", "Leader", "Leaf", "relays"]


def relays(hosts: Sequence[str]) -> dict[int, tuple[int, ...]]:
    """Pure: rank -> host becomes leader -> the ranks its relay serves, itself included.

    Rank 0's host needs none, nor does a single rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    return {here[0]: tuple(here) for host, here in ranks.items() if host != hosts[0] and len(here) > 1}


class _WithLifelines(SocketChannel):
    """``relayed`` are the peers whose connections lead to a relay; ``lifelines`` go by the rank at the other end."""

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[int, Connection],
        relayed: Iterable[int],
        lifelines: Mapping[int, Connection],
    ) -> None:
        super().__init__(rank, size, connections)
        self._relays = [connections[peer] for peer in relayed]
        self._lifelines = dict(lifelines)

    def skip_relays(self) -> None:
        """See :class:`Channel`."""
        self._relays = []

    def _watched(self) -> dict[int, int]:
        return super()._watched() | {lifeline.fileno(): rank for rank, lifeline in self._lifelines.items()}

    @property
    def relayed(self) -> Collection[int]:
        """See :class:`Channel`."""
        return self._lifelines.keys()

    def send_directly(self, ranks: Iterable[int], data: bytes) -> None:
        """See :class:`Channel`."""
        for rank in ranks:
            if rank in self._lifelines:
                self._lifelines[rank].send(data)
            else:
                self.send(rank, data)

    def _hear_aside(self, rank: int) -> None:
        with suppress(EngineError):  # such data also ends the connection, which the watch reports
            self._aside.extend([(rank, data) for data in self._lifelines[rank].receive()])
            self.wake()

    def _part(self, deadline: float) -> None:
        for relay in self._relays:
            relay.await_hang_up(deadline)
        for lifeline in self._lifelines.values():
            lifeline.hang_up()

    def _release(self) -> None:
        super()._release()
        for lifeline in self._lifelines.values():
            lifeline.close()


class Center(_WithLifelines):
    """Rank 0's channel: ``served`` has the ranks (itself included) reached through their leader's connection."""

    def __init__(
        self,
        size: int,
        connections: Mapping[int, Connection],
        served: Mapping[int, Sequence[int]],
        lifelines: Mapping[int, Connection],
    ) -> None:
        super().__init__(0, size, connections, served, lifelines)
        self._leaders = {rank: leader for leader, ranks in served.items() for rank in ranks}

    def send(self, rank: int, data: bytes) -> None:
        """See :class:`Channel`."""
        self.send_to((rank,), data)

    def send_to(self, ranks: Iterable[int], data: bytes) -> None:
        """See :class:`Channel`."""
        served: defaultdict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            if rank in self._leaders:
                served[self._leaders[rank]].append(rank)
            else:
                self._connections[rank].send(data)
        for leader, some in served.items():
            self._connections[leader].send(envelope.pack(some, data))

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        if peer not in self._leaders:
            return super()._open(peer, frames)
        return [(ranks[0], data) for ranks, data in map(envelope.unpack, frames)]


class Leaf(_WithLifelines):
    """For a rank that reaches rank 0 through the relay in the process of ``leader``, which is lost where that ends."""

    def __init__(self, rank: int, size: int, leader: int, connection: Connection, lifeline: Connection) -> None:
        super().__init__(rank, size, {leader: connection}, (leader,), {0: lifeline})
        self._relay = connection

    def send(self, rank: int, data: bytes) -> None:
        """See :class:`Channel`."""
        self._relay.send(data)

    def _open(self, peer: int, frames: list[bytes]) -> list[tuple[int, bytes]]:
        return super()._open(0, frames)


class Leader(SocketChannel):
    """For the rank whose process has the ``relay`` of its host, at the other end of ``connection``; owns the relay.

    The relay hangs up after rank 0 does, so this connection represents the one to rank 0.
    """

    def __init__(self, rank: int, size: int, connection: Connection, relay: Relay) -> None:
        super().__init__(rank, size, {0: connection})
        self._relay = relay

    def _part(self, deadline: float) -> None:
        self._relay.join(deadline)

    def _release(self) -> None:
        super()._release()
        self._relay.release()
