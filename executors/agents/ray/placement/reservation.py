"""Reserves the resources of a job.

Ray keeps a placement group until the driver of the cluster job ends, even if its creator was an actor or a task that
has ended. The workers cannot remove it, because Ray kills them with their owner. A detached actor, which needs no CPU,
outlives the owner and learns of its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError
from ray.util import get_current_placement_group, placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from executors.agents.ray.placement.autoscaler import may_grow
from executors.agents.ray.placement.capacity import fits
from executors.agents.ray.placement.nodes import quiet_seconds
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.shortage import ClusterState, Outlook, explain, show
from executors.api import PlacementError, counted

logger = logging.getLogger(__name__)


# From the creation of the reaper until its owner's first call; only an owner that died meanwhile takes longer.
FIRST_CALL_S = 60.0


class PlacementGroupReaper:
    """The actor that removes ``group``, and then ends itself, when its owner is gone."""

    def __init__(self, group: PlacementGroup) -> None:
        self._group = group
        # Owner: this actor. Bound: FIRST_CALL_S. Abort: watch() cancels it.
        self._unwatched = threading.Timer(FIRST_CALL_S, self._end)
        self._unwatched.daemon = True
        self._unwatched.start()

    async def never(self) -> None:
        """Never return. The reference to the value belongs to the owner, and fails with it."""
        await asyncio.Event().wait()

    async def watch(self, value: list[ObjectRef[None]]) -> None:
        """Wait until the owner of ``value``, the reference that :meth:`never` gave it, is gone."""
        self._unwatched.cancel()
        with contextlib.suppress(RayError):
            await value[0]
        self._end()

    async def ready(self) -> None:
        """Return when :meth:`watch` has begun, if it was called before: Ray keeps the order of the owner's calls."""

    def _end(self) -> None:
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)
        ray.kill(ray.get_runtime_context().current_actor)


def reap_group(group: PlacementGroup) -> Any:
    """Start a reaper of ``group`` and return its handle; None in a driver, whose groups end with it.

    ``ray.kill`` ends the reaper without removing the group.
    """
    if ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return None
    actor_class: Any = ray.remote(num_cpus=0)(PlacementGroupReaper)
    reaper = actor_class.options(lifetime="detached", scheduling_strategy="DEFAULT").remote(group)
    reaper.watch.remote([reaper.never.remote()])
    return reaper


# A wait is explained after so long, and then again from time to time.
WARN_S = 5.0
REMIND_S = 30.0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A ready placement group; ``owned`` if it was made for this job and ends with it.

    ``reaper`` is the actor that removes an owned group when this process dies; None if Ray does so itself.
    """

    request: RayRequest
    group: PlacementGroup
    owned: bool
    reaper: Any = None

    def strategy(self, worker: int) -> PlacementGroupSchedulingStrategy:
        """Where Ray has to put ``worker``."""
        bundle = self.request.bundle_of(worker) if self.owned else -1
        return PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)

    def await_reaper(self, timeout: float) -> None:
        """Return when the reaper watches this process, or warn after ``timeout`` seconds. Does nothing without one."""
        if self.reaper is not None and not ray.wait([self.reaper.ready.remote()], timeout=timeout)[0]:
            logger.warning(
                "the actor that removes the placement group of this job, should this process be killed, did not start "
                "within %g s (timeout_s); the group would stay until the driver ends",
                timeout,
            )

    def release(self) -> None:
        """Give the resources back. A group of the caller stays."""
        if self.owned:
            remove_placement_group(self.group)
        if self.reaper is not None:
            ray.kill(self.reaper)


def reserve(request: RayRequest, timeout: float, use_current: bool = True) -> Reservation:
    """The caller's own placement group if it has one, or else a new one that is ready.

    Raises PlacementError after ``timeout`` seconds; at once when the caller's group is too small, or the cluster, if no
    autoscaler enlarges it and no host has joined it in the last few seconds. No group is left.
    """
    current = get_current_placement_group() if use_current else None
    if current is not None:
        _check_current(request, current)
        return Reservation(request, current, owned=False)
    reservation = Reservation(request, _new_group(request), owned=True)
    try:
        reservation = replace(reservation, reaper=reap_group(reservation.group))
        _wait_ready(reservation, timeout)
    except BaseException:
        reservation.release()
        raise
    return reservation


def cluster_state() -> ClusterState:
    """The current resources of the cluster."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return ClusterState(
        available=ray.available_resources(),
        total=ray.cluster_resources(),
        hosts={_name(node): node["Resources"] for node in nodes},
        labels={_name(node): node.get("Labels") or {} for node in nodes},
    )


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']} {node['NodeID'][:8]}"


def _new_group(request: RayRequest) -> PlacementGroup:
    labels = {"bundle_label_selector": request.selectors} if request.selectors else {}
    group: PlacementGroup = placement_group(request.bundles, strategy=request.strategy, **labels)
    return group


def _wait_ready(reservation: Reservation, timeout: float) -> None:
    start = time.monotonic()
    due = WARN_S
    outlook = Outlook(reservation.request, may_grow, quiet_seconds())
    outlook.check(cluster_state(), start)
    # Whole seconds: Ray cuts off the fraction.
    while not reservation.group.wait(1):
        now = time.monotonic()
        outlook.check(cluster_state(), now)
        waited = now - start
        if waited >= timeout:
            text = explain(reservation.request, cluster_state())
            raise PlacementError(f"{text}\n  waited {timeout:g} s (placement_group_timeout_s)")
        if waited >= due:
            text = explain(reservation.request, cluster_state())
            logger.warning("%s\n  waiting up to %g s for it (placement_group_timeout_s)", text, timeout)
            due = waited + REMIND_S


def _check_current(request: RayRequest, group: PlacementGroup) -> None:
    if request.of_a_new_group:
        raise PlacementError(
            f"{' and '.join(request.of_a_new_group)} cannot change the current placement group, whose bundles are "
            "placed already; leave that out, or set use_current_placement_group=False"
        )
    bundles = group.bundle_specs
    room = sum(fits(request.worker, bundle) for bundle in bundles)
    if room < request.size:
        raise PlacementError(
            f"the current placement group has room for {room} of {counted(request.size, 'worker')} with "
            f"{show(request.worker)} each; its bundles are: {'; '.join(show(bundle) for bundle in bundles)}. Ask for "
            "less, make the group larger, or set use_current_placement_group=False"
        )
