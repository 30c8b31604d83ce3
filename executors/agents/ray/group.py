"""The actors of a job: starting, calling and ending them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RuntimeEnvSetupError
from ray.util import placement_group_table

from executors.agents.ray.placement.nodes import how
from executors.agents.ray.placement.reservation import REMIND_S, WARN_S, Reservation
from executors.agents.ray.worker import HorovodWorker, Location, actor_class
from executors.api import ExecutorError, Slot, StartTimeoutError, counted
from executors.job.worlds import assign_ranks

logger = logging.getLogger(__name__)

POLITE_S = 5.0
GONE_S = 2.0
# So many workers of a job may be lost while it starts.
REPLACEMENTS = 3
ADVICE = (
    "a node may have been lost, the group may be in use, or Python is slow to start: raise timeout_s or start again"
)


@dataclass(frozen=True, slots=True)
class JobActor:
    """The actor of one rank, and its location."""

    actor: ActorHandle[HorovodWorker]
    location: Location
    slot: Slot

    def __str__(self) -> str:
        return f"the worker of rank {self.slot.rank} (process {self.location.pid}) on {self.location}"


def launch(reservation: Reservation, timeout: float) -> list[JobActor]:
    """Start the actors; the members are in the order of their ranks. A few that are lost meanwhile are replaced.

    Raises StartTimeoutError after ``timeout`` seconds, ExecutorError when an actor cannot start; none is left then.
    """
    starting = _Starting(reservation)
    try:
        locations = starting.wait(timeout)
    except BaseException:
        kill(starting.actors)
        raise
    slots = assign_ranks([location.node for location in locations])
    members = [JobActor(*columns) for columns in zip(starting.actors, locations, slots, strict=True)]
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


class _Starting:
    """The actors of a job until all of them have told their locations."""

    def __init__(self, reservation: Reservation) -> None:
        self.actors: list[ActorHandle[HorovodWorker]] = []
        self._reservation = reservation
        self._class = actor_class(reservation.request)
        self._pending: dict[ObjectRef[Location], int] = {}
        self._locations: dict[int, Location] = {}
        self._lost = 0
        for worker in range(reservation.request.size):
            self.actors.append(self._create(worker))

    def wait(self, timeout: float) -> list[Location]:
        """The locations of the actors. Raises StartTimeoutError and ExecutorError; the caller then ends the actors."""
        start = time.monotonic()
        due = WARN_S
        while self._pending:
            waited = time.monotonic() - start
            if waited >= timeout:
                raise StartTimeoutError(f"{self._progress(timeout)} (timeout_s); {self._state()}: {ADVICE}")
            if waited >= due:
                logger.warning("%s; waiting up to %g s (timeout_s); %s", self._progress(waited), timeout, self._state())
                due = waited + REMIND_S
            done, _ = ray.wait(list(self._pending), num_returns=1, timeout=min(timeout, due) - waited)
            for reference in done:
                self._take(reference, self._pending.pop(reference))
        return [self._locations[worker] for worker in range(len(self.actors))]

    def _create(self, worker: int) -> ActorHandle[HorovodWorker]:
        actor: ActorHandle[HorovodWorker] = self._class.options(
            scheduling_strategy=self._reservation.strategy(worker)
        ).remote()
        self._pending[actor.location.remote()] = worker
        return actor

    def _take(self, reference: ObjectRef[Location], worker: int) -> None:
        try:
            self._locations[worker] = ray.get(reference)
        except RayError as error:
            self._replace(worker, error)

    def _replace(self, worker: int, error: RayError) -> None:
        """Start another actor in place of one that was lost. Ray moves the bundles of a node that died."""
        self._lost += 1
        if not isinstance(error, RayActorError) or error.actor_init_failed or self._lost > REPLACEMENTS:
            raise _refusal(error, self._lost) from error
        logger.warning("a worker %s before it was ready; another one takes its place", how(error))
        # It may only be out of reach, and would come back to the place of the other one.
        with contextlib.suppress(RayError):
            ray.kill(self.actors[worker])
        self.actors[worker] = self._create(worker)

    def _progress(self, seconds: float) -> str:
        return f"{len(self._locations)} of {counted(len(self.actors), 'worker')} started within {seconds:.0f} s"

    def _state(self) -> str:
        state = placement_group_table(self._reservation.group).get("state", "unknown")
        return f"their placement group is in state {state}"


def _refusal(error: RayError, lost: int) -> ExecutorError:
    if isinstance(error, RuntimeEnvSetupError):
        last = str(error).strip().splitlines()[-1].strip()
        return ExecutorError(f"the runtime_env of the workers could not be set up: {last}")
    if lost > REPLACEMENTS:
        return ExecutorError(f"workers were lost {lost} times before they were ready; the last one {how(error)}")
    return ExecutorError(
        f"a worker could not be started ({error}); hvd-cluster must be installed on every node of the Ray cluster"
    )
