"""Which nodes of a Ray cluster a job may use, and for how many workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from executors.agents.ray.placement.capacity import Share, slots
from executors.agents.ray.placement.nodes import Names, NodePlace, cluster_now, places_now
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.room import Room
from executors.job.discovery import HostDiscovery


class RoomDiscovery:
    """Counts what the job can get of ``room``: the places of its own workers, and resources that nobody uses.

    ``shares`` tells how many workers of the job each node has. ``hosts``, a discovery of the user, may name fewer
    nodes, and fewer slots. A job that needs ``least`` workers and has none takes no place while there are too few: it
    would keep it from another job that waits for the same.
    """

    def __init__(
        self,
        room: Room,
        shares: Callable[[], Mapping[str, Share]],
        least: int = 1,
        hosts: HostDiscovery | None = None,
        places: Callable[[], list[NodePlace]] = places_now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._room = room
        self._shares = shares
        self._least = least
        self._hosts = hosts
        self._names = Names(places)
        self._clock = clock
        self._closed_until = 0.0
        self._before: dict[str, int] = {}
        self._withdrawn: Mapping[str, int] = {}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The slots of each node, by node id."""
        # In this order: a share that is settled now was so when Ray counted.
        shares = self._shares()
        withdrawn, self._withdrawn = self._withdrawn, {}
        found = {**self._allowed(self._room.slots(shares, self._before)), **withdrawn}
        found = self._before = {node: count for node, count in found.items() if count}
        has_workers = any(share.workers for share in shares.values())
        may_start = sum(found.values()) >= self._least and self._clock() >= self._closed_until
        return found if has_workers or may_start else {}

    def close(self, seconds: float) -> None:
        """Find no place for so long, while the job has no worker; from any thread."""
        self._closed_until = self._clock() + seconds

    def withdraw(self, node: str, count: int) -> None:
        """The job has taken back workers that Ray could not place on ``node``, and keeps ``count``; from any thread.

        That is found at least once, so that more is news.
        """
        self._withdrawn = {**self._withdrawn, node: count}

    def _allowed(self, found: dict[str, int]) -> dict[str, int]:
        if self._hosts is None:
            return found
        named = self._names.slots(self._hosts.find_available_hosts_and_slots())
        allowed = {self._names.node(name): count for name, count in named.items()}
        both = {node: min(count, allowed.get(node, 0)) for node, count in found.items()}
        return {node: count for node, count in both.items() if count}


class RayHostDiscovery:
    """Finds the nodes of the cluster that this process is connected to, for ``settings.discovery``.

    A node has a slot for each worker of ``cpus_per_worker`` CPUs and, with ``use_gpu``, ``gpus_per_worker`` GPUs that
    fits into its free resources. Nodes that drain have none. ``cpus_per_slot`` and ``gpus_per_slot`` are other names of
    these arguments. Raises ValueError for numbers that make no sense.
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: int = 1,
        gpus_per_worker: int = 1,
        cpus_per_slot: int | None = None,
        gpus_per_slot: int | None = None,
    ) -> None:
        cpus = cpus_per_worker if cpus_per_slot is None else cpus_per_slot
        gpus = gpus_per_worker if gpus_per_slot is None else gpus_per_slot
        request = RayRequest(1, cpus_per_worker=cpus, use_gpu=use_gpu, gpus_per_worker=gpus if use_gpu else None)
        self._need = request.worker

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The slots of each node, by node id."""
        return slots(cluster_now(), self._need, {}, {})
