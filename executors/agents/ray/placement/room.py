"""The room for the workers of an elastic job: the nodes of the cluster, or the placement group of its driver."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.util import get_current_placement_group, placement_group_table
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from executors.agents.ray.placement.capacity import Resources, Share, count_slots, fits, slots
from executors.agents.ray.placement.nodes import cluster_now
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.reservation import cluster_state
from executors.agents.ray.placement.shortage import explain, show
from executors.api import counted

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle of a placement group on ``node``: its resources, without those of the task that drives the job.

    ``free`` are those that nobody uses now.
    """

    index: int
    node: str
    total: Resources = field(default_factory=dict)
    free: Resources = field(default_factory=dict)


def within(index: int, group: str, resources: Resources) -> dict[str, float]:
    """The part of ``resources`` that belongs to bundle ``index`` of ``group``: Ray calls its CPUs CPU_group_0_<id>."""
    end = f"_group_{index}_{group}"
    return {name.removesuffix(end): amount for name, amount in resources.items() if name.endswith(end)}


def used_by(spec: Resources, own: Resources) -> dict[str, float]:
    """The rest of a bundle of ``spec`` beside ``own``."""
    return {name: amount - own.get(name, 0.0) for name, amount in spec.items()}


def room(bundles: Sequence[Bundle], need: Resources) -> int:
    """How many workers with ``need`` each the bundles can hold when nobody else uses them."""
    return sum(fits(need, bundle.total) for bundle in bundles)


def slots_in(
    bundles: Sequence[Bundle], need: Resources, shares: Mapping[str, Share], before: Mapping[str, int]
) -> dict[str, int]:
    """The workers that each node may have in the group, as :func:`executors.agents.ray.placement.capacity.slots`."""
    nodes = dict.fromkeys(bundle.node for bundle in bundles)
    free = {node: sum(fits(need, each.free) for each in bundles if each.node == node) for node in nodes}
    total = {node: room([each for each in bundles if each.node == node], need) for node in nodes}
    return count_slots(free, total, shares, before)


def bundle_for(bundles: Sequence[Bundle], need: Resources, node: str, taken: Sequence[int]) -> int:
    """The index of the bundle on ``node`` for one more worker, while the job has workers in those ``taken``.

    It is the one with the most room: Ray counts late what was taken. -1, any bundle, if the group has none there.
    """
    own = Counter(taken)
    best = max(
        (bundle for bundle in bundles if bundle.node == node),
        key=lambda bundle: (fits(need, bundle.free) > 0, fits(need, bundle.total) - own[bundle.index]),
        default=None,
    )
    return -1 if best is None else best.index


def too_small(wanted: str, count: int, need: Resources, bundles: Sequence[Bundle]) -> str:
    """Why ``count`` workers, which the argument ``wanted`` asks for, are too many for the group, and the remedy."""
    has = room(bundles, need)
    shown = "; ".join(show(bundle.total) for bundle in bundles) or "none"
    lower = f"lower {wanted} to {has}, " if has else ""
    return (
        f"{wanted} is {count}, but the current placement group has room for {counted(has, 'worker')} with {show(need)} "
        f"each beside this task; its bundles have room for: {shown}. Do one of these: {lower}make the group larger, or "
        "set use_current_placement_group=False"
    )


ANYWHERE = -1


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A place for a worker: Ray's ``strategy``, and the index of the ``bundle``, or ANYWHERE."""

    strategy: Any
    bundle: int = ANYWHERE


class Room(Protocol):
    """The interface that an elastic job needs."""

    is_fixed: bool
    """Whether no autoscaler can enlarge it."""

    def slots(self, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
        """The workers that each node may have; see :func:`executors.agents.ray.placement.capacity.slots`."""

    def has_free(self, node: str) -> bool:
        """Whether another worker fits there now."""

    def place(self, node: str, taken: Sequence[int]) -> WorkerPlace:
        """The place of one more worker on ``node``, while the job has workers in the bundles ``taken``."""

    def shortage(self, count: int) -> str:
        """Why ``count`` workers have no room now."""


class ClusterRoom:
    """All nodes whose labels match, for workers of ``shape``."""

    is_fixed = False

    def __init__(self, shape: RayRequest) -> None:
        self._shape = shape

    def slots(self, shares: Mapping[str, Share], before: Mapping[str, int]) -> dict[str, int]:
        cluster = cluster_now().with_labels(self._shape.label_selector or {})
        return slots(cluster, self._shape.worker, shares, before)

    def has_free(self, node: str) -> bool:
        found = cluster_now().nodes.get(node)
        return found is not None and fits(self._shape.worker, found.free) > 0

    def place(self, node: str, taken: Sequence[int]) -> WorkerPlace:
        return WorkerPlace(NodeAffinitySchedulingStrategy(node, soft=False))

    def shortage(self, count: int) -> str:
        return explain(replace(self._shape, num_workers=count), cluster_state())


class GroupRoom:
    """The bundles of ``group`` on nodes whose labels match, beside what this process uses of them itself."""

    is_fixed = True

    def __init__(self, group: PlacementGroup, shape: RayRequest) -> None:
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
        return slots_in(self.bundles(), self._shape.worker, shares, before)

    def has_free(self, node: str) -> bool:
        return any(fits(self._shape.worker, bundle.free) for bundle in self.bundles() if bundle.node == node)

    def place(self, node: str, taken: Sequence[int]) -> WorkerPlace:
        bundle = bundle_for(self.bundles(), self._shape.worker, node, taken)
        return WorkerPlace(PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle), bundle)

    def shortage(self, count: int) -> str:
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


def room_of(shape: RayRequest, use_current_group: bool) -> ClusterRoom | GroupRoom:
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
