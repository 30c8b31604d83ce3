"""A world whose ranks are on hosts that speak for them."""

from collections import defaultdict, deque
from dataclasses import dataclass

from collectives.controller.aggregation import Aggregator
from collectives.controller.messages import Ready, Together, decode, encode
from collectives.controller.process_sets import ProcessSets
from tests.collectives.controller.negotiation_simulation import World


def expanded(rank, message):
    """The meaning of ``message``, as (rank, message) without Together."""
    if not isinstance(message, Together):
        return [(rank, message)]
    fields = {name: getattr(message, name) for name in ("requests", "ids", "urgent", "urgent_ids")}
    return [(each, Ready(**fields)) for each in message.ranks]


@dataclass
class HostedWorld(World):
    """``hosts`` are disjoint groups of ranks, each with an aggregator; the other ranks are linked as in a World.

    What an aggregator says, and what it must hand out, travels on links of its own, which the lowest rank of the host
    moves on in addition to its own links.
    """

    hosts: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self):
        super().__post_init__()
        sets = ProcessSets(self.size, self.sets)
        self.aggregators = {host[0]: Aggregator(host, sets) for host in self.hosts}
        self.leaders = {rank: host[0] for host in self.hosts for rank in host}
        self.trunk_up = {leader: deque() for leader in self.aggregators}
        self.trunk_down = {leader: deque() for leader in self.aggregators}

    def rise(self, rank):
        leader = self.leaders.get(rank)
        if leader is None:
            return super().rise(rank)
        moved = bool(self.up[rank])
        if moved:
            self._climb(leader, self.aggregators[leader].up(rank, decode(self.up[rank].popleft())))
        return (rank == leader and self._arrive(leader)) or moved

    def _climb(self, leader, messages):
        for rank, message in messages:
            self.traffic.append((rank, message))
            self.trunk_up[leader].append((rank, encode(message)))

    def _arrive(self, leader):
        if not self.trunk_up[leader]:
            return False
        rank, data = self.trunk_up[leader].popleft()
        self.coordinator.receive(leader if rank is None else rank, decode(data), self.now)
        return True

    def decide(self):
        outgoing = self.coordinator.decide(self.now)
        for each in outgoing:
            served = defaultdict(list)
            for rank in each.ranks:
                if rank in self.leaders:
                    served[self.leaders[rank]].append(rank)
                else:
                    self._send(self.down[rank], rank, each.message)
            for leader, ranks in served.items():
                self._send(self.trunk_down[leader], tuple(ranks), each.message)
                self.trunk_down[leader].append(ranks)
        return bool(outgoing)

    def fall(self, rank):
        handed_out = bool(self.trunk_down.get(rank)) and self._hand_out(rank)
        return super().fall(rank) or handed_out

    def _hand_out(self, leader):
        data, ranks = self.trunk_down[leader].popleft(), self.trunk_down[leader].popleft()
        for rank in ranks:
            self.down[rank].append(data)
        self._climb(leader, self.aggregators[leader].down(decode(data)))
        return True

    def flush_held(self):
        """The aggregators have been holding something for long."""
        for leader, aggregator in self.aggregators.items():
            self._climb(leader, aggregator.flush())

    def wait(self):
        self.flush_held()
        self.settle()
        super().wait()
