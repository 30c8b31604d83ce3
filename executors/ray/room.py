"""The room for the workers of an elastic job: the nodes of the cluster, or the placement group of its driver."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.util import get_current_placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from executors.counted import counted
from executors.ray.bundles import Bundle, bundle_for, room, slots_in, too_small, used_by, within
from executors.ray.capacity import Resources, Share, fits, slots
from executors.ray.nodes import cluster_now
from executors.ray.placement_group import cluster_state
from executors.ray.request import Request
from executors.ray.shortage import explain, show

__all__ = ["ANYWHERE", "ClusterRoom", "GroupRoom", "Place", "Room", "room_of"]

logger = logging.getLogger(__name__)

ANYWHERE = -1


@dataclass(frozen=True, slots=True)
class Place:
    """A place for a worker: Ray's ``strategy``, and the index of the ``bundle``, or ANYWHERE."""

    strategy: Any
    bundle: int = ANYWHERE


class Room(Protocol):
    """The interface that an elastic job needs."""

    is_fixed: bool
    """Whether no autoscaler can enlarge it."""

    def slots(self, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
        """The workers that each node may have; see :func:`executors.ray.capacity.slots`."""

    def has_free(self, node: str) -> bool:
        """Whether another worker fits there now."""

    def place(self, node: str, taken: Sequence[int]) -> Place:
        """The place of one more worker on ``node``, while the job has workers in the bundles ``taken``."""

    def shortage(self, count: int) -> str:
        """Why ``count`` workers have no room now."""


class ClusterRoom:
    """All nodes whose labels match, for workers of ``shape``."""

    is_fixed = False

    def __init__(self, shape: Request) -> None:
        self._shape = shape

    def slots(self, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
        """See :class:`Room`."""
        cluster = cluster_now().with_labels(self._shape.label_selector or {})
        return slots(cluster, self._shape.worker, shares, before)

    def has_free(self, node: str) -> bool:
        """See :class:`Room`."""
        found = cluster_now().nodes.get(node)
        return found is not None and fits(self._shape.worker, found.free) > 0

    def place(self, node: str, taken: Sequence[int]) -> Place:
        """See :class:`Room`."""
        return Place(NodeAffinitySchedulingStrategy(node, soft=False))

    def shortage(self, count: int) -> str:
        """See :class:`Room`."""
        return explain(replace(self._shape, num_workers=count), cluster_state())


class GroupRoom:
    """The bundles of ``group`` on nodes whose labels match, beside what this process uses of them itself."""

    is_fixed = True

    def __init__(self, group: PlacementGroup, shape: Request) -> None:
        self._group = group
        self._shape = shape
        self._own = _own_resources()

    def bundles(self) -> list[Bundle]:
        """Those that are placed now, on nodes that take new work. Ray moves those of a node that has died."""
        table, id = placement_group_table(self._group), self._group.id.hex()
        cluster = cluster_now().with_labels(self._shape.label_selector or {})
        places: Mapping[int, str] = table.get("bundles_to_node_id", {})
        specs: Mapping[int, Resources] = table.get("bundles", {})
        return [
            Bundle(
                index,
                node,
                used_by(specs[index], within(index, id, self._own)),
                within(index, id, cluster.nodes[node].free),
            )
            for index, node in places.items()
            if node in cluster.nodes
        ]

    def slots(self, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
        """See :class:`Room`."""
        return slots_in(self.bundles(), self._shape.worker, shares, before)

    def has_free(self, node: str) -> bool:
        """See :class:`Room`."""
        return any(fits(self._shape.worker, bundle.free) for bundle in self.bundles() if bundle.node == node)

    def place(self, node: str, taken: Sequence[int]) -> Place:
        """See :class:`Room`."""
        bundle = bundle_for(self.bundles(), self._shape.worker, node, taken)
        return Place(PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle), bundle)

    def shortage(self, count: int) -> str:
        """See :class:`Room`."""
        bundles, need = self.bundles(), self._shape.worker
        free = sum(fits(need, bundle.free) for bundle in bundles)
        return (
            f"the current placement group has no room for {counted(count, 'worker')} with {show(need)} each: it has "
            f"room for {room(bundles, need)}, of which {free} are free; wait for other tasks in it, make it larger, "
            "or set use_current_placement_group=False"
        )

    def check(self, least: int, size: int) -> int:
        """The number of workers to start, of ``size`` that are wanted. Raises ValueError if ``least`` are too many."""
        bundles, need = self.bundles(), self._shape.worker
        has = room(bundles, need)
        if has < least:
            raise ValueError(too_small("min_workers", least, need, bundles))
        if has < size:
            logger.warning("%s. The job starts with %d", too_small("num_workers", size, need, bundles), has)
        return min(size, has)


def room_of(shape: Request, use_current_group: bool) -> ClusterRoom | GroupRoom:
    """The room for workers of ``shape`` that a job of this process may use."""
    group = get_current_placement_group() if use_current_group else None
    return ClusterRoom(shape) if group is None else GroupRoom(group, shape)


def _own_resources() -> dict[str, float]:
    """The resources of this task or actor, by Ray's names, such as CPU_group_0_<id> in a bundle."""
    with suppress(AttributeError):
        # Ray has no public function that tells the bundle.
        worker: Any = ray._private.worker.global_worker
        held: Mapping[str, Any] = worker.core_worker.resource_ids()
        return {name: sum(amount for _, amount in parts) for name, parts in held.items()}
    return {}
