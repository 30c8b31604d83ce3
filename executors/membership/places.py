"""The hosts of workers that are to start: pure."""

from __future__ import annotations

import heapq
from collections.abc import Mapping

__all__ = ["spread"]


def spread(number: int, free: Mapping[str, int], present: Mapping[str, int]) -> list[str]:
    """The host of each of up to ``number`` workers, as far as there are ``free`` slots.

    Each gets the host with the fewest workers, of which ``present`` has those that stay: the loss of one host shall
    leave others that have the state of the training. Among equals the first host counts.
    """
    heap = [(present.get(host, 0), order, host, count) for order, (host, count) in enumerate(free.items()) if count > 0]
    heapq.heapify(heap)
    chosen: list[str] = []
    while heap and len(chosen) < number:
        workers, order, host, count = heap[0]
        chosen.append(host)
        if count > 1:
            heapq.heapreplace(heap, (workers + 1, order, host, count - 1))
        else:
            heapq.heappop(heap)
    return chosen
