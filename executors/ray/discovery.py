"""Which nodes of a Ray cluster a job may use, and for how many workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from executors.ray.capacity import Cluster, Share, slots
from executors.ray.nodes import cluster_now
from executors.ray.request import Request

__all__ = ["NodeDiscovery", "RayHostDiscovery"]


class NodeDiscovery:
    """Counts what the job can get: the places of its own workers, and resources that nobody uses.

    ``need`` are the resources of a worker, ``shares`` tells how many workers of the job each node has. Nodes must match
    ``labels``, a label selector of Ray.
    """

    def __init__(
        self,
        need: Mapping[str, float],
        shares: Callable[[], Mapping[str, Share]] = dict,
        labels: Mapping[str, str] | None = None,
        cluster: Callable[[], Cluster] = cluster_now,
    ) -> None:
        self._need = need
        self._shares = shares
        self._labels = labels or {}
        self._cluster = cluster
        self._before: dict[str, int] = {}

    def find_available_hosts_and_slots(self) -> Mapping[str, int]:
        """The slots of each node, by node id."""
        # In this order: a share that is settled now was so when Ray counted.
        shares = self._shares()
        self._before = slots(self._cluster().with_labels(self._labels), self._need, shares, self._before)
        return self._before


class RayHostDiscovery(NodeDiscovery):
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
        request = Request(1, cpus_per_worker=cpus, use_gpu=use_gpu, gpus_per_worker=gpus if use_gpu else None)
        super().__init__(request.worker)
