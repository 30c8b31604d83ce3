"""Pure: the hosts that workers landed on -> ranks; the hosts of ranks -> their places."""

from __future__ import annotations

from collections.abc import Sequence

from executors.api import Slot

__all__ = ["assign_ranks", "slots_of"]


def assign_ranks(hosts: Sequence[str]) -> list[Slot]:
    """A slot for each worker, in the order of the workers: ``result[i]`` is the slot of worker ``i`` on ``hosts[i]``.

    Hosts are taken in order of first appearance, so that the first worker is rank 0; ranks are dense on each host.
    """
    order = [i for host in dict.fromkeys(hosts) for i, other in enumerate(hosts) if other == host]
    slots = dict(zip(order, slots_of([hosts[worker] for worker in order]), strict=True))
    return [slots[worker] for worker in range(len(hosts))]


def slots_of(hosts: Sequence[str]) -> list[Slot]:
    """The slot of each rank, where rank ``r`` is on ``hosts[r]``; local ranks are in the order of the ranks.

    ``cross_rank`` counts the hosts before this one that have a rank with the same local rank.
    """
    ranks = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    slots: dict[int, Slot] = {}
    for host, own in ranks.items():
        for local_rank, rank in enumerate(own):
            peers = [name for name, others in ranks.items() if len(others) > local_rank]
            slots[rank] = Slot(
                host=host,
                rank=rank,
                size=len(hosts),
                local_rank=local_rank,
                local_size=len(own),
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
    return [slots[rank] for rank in range(len(hosts))]
