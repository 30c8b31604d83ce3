"""Pure: the hosts that workers landed on -> ranks."""

from __future__ import annotations

from collections.abc import Sequence

from executors.api import Slot

__all__ = ["assign_ranks"]


def assign_ranks(hosts: Sequence[str]) -> list[Slot]:
    """A slot for each worker, in the order of the workers: ``result[i]`` is the slot of worker ``i`` on ``hosts[i]``.

    Hosts are taken in order of first appearance, so that the first worker is rank 0; ranks are dense on each host.
    ``cross_rank`` counts the hosts before this one that have a rank with the same local rank.
    """
    order = {host: [i for i, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)}
    slots: dict[int, Slot] = {}
    for host, workers in order.items():
        for local_rank, worker in enumerate(workers):
            peers = [name for name, others in order.items() if len(others) > local_rank]
            slots[worker] = Slot(
                host=host,
                rank=len(slots),
                size=len(hosts),
                local_rank=local_rank,
                local_size=len(workers),
                cross_rank=peers.index(host),
                cross_size=len(peers),
            )
    return [slots[worker] for worker in range(len(hosts))]
