"""The actors of a job: starting, calling and ending them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util import placement_group_table

from executors.api import ExecutorError, Slot, StartTimeoutError
from executors.placement import assign_ranks
from executors.ray.placement_group import Reservation
from executors.ray.shortage import counted
from executors.ray.worker import HorovodWorker, Location

__all__ = ["Member", "dismiss", "kill", "launch"]

POLITE_S = 5.0
GONE_S = 2.0


@dataclass(frozen=True, slots=True)
class Member:
    """The actor of one rank, and its location."""

    actor: ActorHandle[HorovodWorker]
    location: Location
    slot: Slot

    def __str__(self) -> str:
        return f"the worker of rank {self.slot.rank} (process {self.location.pid}) on {self.location}"


def launch(reservation: Reservation, timeout: float) -> list[Member]:
    """Start the actors; the members are in the order of their ranks.

    Raises StartTimeoutError after ``timeout`` seconds, ExecutorError when an actor cannot start; none is left then.
    """
    actors = _create(reservation)
    try:
        locations = _locations(actors, reservation, timeout)
    except BaseException:
        kill(actors)
        raise
    slots = assign_ranks([location.node for location in locations])
    members = [Member(*columns) for columns in zip(actors, locations, slots, strict=True)]
    return sorted(members, key=lambda member: member.slot.rank)


def dismiss(actors: Sequence[ActorHandle[HorovodWorker]]) -> None:
    """Let the actors exit on their own; after a few seconds those that are still busy are left to :func:`kill`."""
    with contextlib.suppress(RayError):
        ray.wait([actor.__ray_terminate__.remote() for actor in actors], num_returns=len(actors), timeout=POLITE_S)


def kill(actors: Sequence[ActorHandle[HorovodWorker]]) -> None:
    """Kill the actors, dead ones too, and wait for a moment until Ray has noticed."""
    for actor in actors:
        with contextlib.suppress(RayError):
            ray.kill(actor)
    with contextlib.suppress(RayError):
        ray.wait([actor.location.remote() for actor in actors], num_returns=len(actors), timeout=GONE_S)


def _create(reservation: Reservation) -> list[ActorHandle[HorovodWorker]]:
    needs = reservation.request.worker
    actor_class: Any = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(HorovodWorker)
    strategies = [reservation.strategy(worker) for worker in range(reservation.request.size)]
    return [actor_class.options(scheduling_strategy=strategy).remote() for strategy in strategies]


def _locations(
    actors: Sequence[ActorHandle[HorovodWorker]], reservation: Reservation, timeout: float
) -> list[Location]:
    deadline = time.monotonic() + timeout
    locations: dict[ObjectRef[Location], Location] = {}
    order: list[ObjectRef[Location]] = [actor.location.remote() for actor in actors]
    waiting = order
    while waiting:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise _too_late(len(locations), reservation, timeout)
        locations |= {reference: _location(reference) for reference in done}
    return [locations[reference] for reference in order]


def _location(reference: ObjectRef[Location]) -> Location:
    try:
        return ray.get(reference)
    except RayError as error:
        raise ExecutorError(
            f"a worker could not be started ({error}); hvd-cluster must be installed on every node of the Ray cluster"
        ) from error


def _too_late(started: int, reservation: Reservation, timeout: float) -> StartTimeoutError:
    state = placement_group_table(reservation.group).get("state", "unknown")
    return StartTimeoutError(
        f"{started} of {counted(reservation.request.size, 'worker')} started within {timeout:g} s (timeout_s); their "
        f"placement group is in state {state}. A node may have been lost, the group may be in use, or Python is slow "
        "to start: raise timeout_s or start again"
    )
