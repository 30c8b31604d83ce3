"""One elastic job: actors that come and go one by one, as the driver decides."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import ray

from collectives import override
from executors.agents.ray.actors import Actors, ActorWork, Events
from executors.agents.ray.placement.autoscaler import Demand
from executors.agents.ray.placement.discovery import RoomDiscovery
from executors.agents.ray.placement.nodes import Departures, Names, death_of, places_now
from executors.agents.ray.placement.request import RayRequest
from executors.agents.ray.placement.room import ClusterRoom, GroupRoom, Room, room_of
from executors.agents.ray.placement.withdrawal import Withdrawal
from executors.agents.ray.worker_log import Callback, listen
from executors.api import ExecutorError, PlacementError, WorkerError
from executors.dashboard.picture import Address
from executors.driver.job import LiveJob
from executors.driver.outcome import Outcome
from executors.failures import Failure
from executors.job.discovery import HostDiscovery, HostWatch
from executors.job.job import Job
from executors.job.loop import Loop
from executors.membership import Limits

logger = logging.getLogger(__name__)

# Ray answers within two milliseconds about a few nodes. With many, its discovery takes a tenth of the time at most.
DISCOVERY = {"interval": 0.1, "rest": 10.0}
# One of the user may take more.
USERS_DISCOVERY = {"interval": 0.5}
# For missing workers, and for nodes that will be gone.
LOOK_S = 1.0
# A job that has no world yet says after so long what is missing, and then again from time to time.
WARN_S = 5.0
REMIND_S = 30.0


@dataclass(frozen=True, slots=True)
class ElasticOptions:
    """How to run an elastic job.

    Each worker gets what one of ``shape`` does, ``variables`` and the interfaces ``nics``, and has ``start_timeout``
    seconds to come up. ``discovery`` finds nodes and their slots; None: what the job can get of the nodes whose labels
    match the selector of ``shape``. ``dashboard`` is where the live page is served; None: there is none. If this task
    or actor is in a placement group, its workers go there, unless ``use_current_group`` is False.
    """

    shape: RayRequest
    start_timeout: float = 30.0
    nics: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    discovery: HostDiscovery | None = None
    dashboard: Address | None = None
    use_current_group: bool = True

    @property
    def need(self) -> Mapping[str, float]:
        """The resources of a worker."""
        return self.shape.worker

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels that its node must have."""
        return self.shape.label_selector or {}


def run_elastic(
    work: ActorWork, limits: Limits, options: ElasticOptions, callbacks: Sequence[Callback] = ()
) -> list[object]:
    """Do ``work`` on workers that may change; the values by rank, in the world in which the first worker was done.

    ``callbacks`` get what the workers log. Raises the exception of a function as itself, with a RemoteError as its
    cause; WorkerError if the job cannot go on after a loss; ExecutorError for too few workers, and PlacementError if
    they never were enough; DiscoveryError if the nodes cannot be found; ValueError if the placement group of this task
    cannot hold the fewest.
    """
    with ElasticRayJob(work, limits, options, callbacks) as job:
        job.run()
    return job.values()


class ElasticRayJob(LiveJob, Events):
    """One job, whose workers are actors: a context manager that leaves none of them behind."""

    _loop: Loop

    def __init__(
        self, work: ActorWork, limits: Limits, options: ElasticOptions, callbacks: Sequence[Callback] = ()
    ) -> None:
        self._room, limits = _room_and_limits(options, limits)
        # Any node may join, so the address must be one that other nodes can reach.
        job, seconds = Job(limits.size, ray.util.get_node_ip_address()), options.start_timeout
        super().__init__(limits, job, seconds, options.dashboard, withdraws=self._withdraw_late)
        self._options = options
        self._callbacks = callbacks
        self._loop = Loop()
        self._actors = Actors(options.shape, self._room, work, self, self._loop.soon)
        self._discovery = RoomDiscovery(self._room, self._actors.shares, limits.least, options.discovery)
        self._withdrawal = Withdrawal(self._actors, self._discovery, limits.least, options.start_timeout)
        wanted = limits.most if limits.is_bounded else limits.size
        self._demand = None if self._room.is_fixed else Demand(wanted, options.need, options.labels)
        self._names = Names(places_now)
        self._departures = Departures()
        self._known: set[str] = set()

    @override
    def _begin(self, stack: ExitStack) -> None:
        stack.callback(listen(self._job, self.soon, self._callbacks))
        stack.callback(self._actors.close)
        if self._demand is not None:
            stack.callback(self._demand.withdraw)

    def run(self) -> None:
        """Return when every worker has ended and none will be started. Raises the failure, if there was one."""
        pace = USERS_DISCOVERY if self._options.discovery else DISCOVERY
        self._stack.enter_context(HostWatch(self._discovery, self._found, self.soon, **pace))
        self._look_again()
        self._loop.after(WARN_S, self._explain_wait)
        self._loop.run(lambda: self.driver.is_over and not self._actors.running)
        try:
            self.driver.check()
        except WorkerError:
            raise
        except ExecutorError as error:
            raise self._explained(error) from error.__cause__

    # Agents.

    @override
    def start(self, worker: str, host: str, environment: Mapping[str, str]) -> None:
        given = self.variables(environment, self._options.variables, self._options.nics)
        self._actors.start(worker, self._names.node(host), given)

    @override
    def stop(self, worker: str) -> None:
        """Such a worker has nothing to hand over."""
        self._actors.kill(worker)

    @override
    def kill(self, worker: str) -> None:
        self._actors.kill(worker)

    @override
    def end(self, spare: str | None = None) -> None:
        self._actors.end()

    # Events.

    @override
    def up(self, worker: str) -> None:
        self.driver.up(worker)

    @override
    def returned(self, worker: str, outcome: Outcome) -> None:
        self.outcomes[worker] = outcome
        self.report(worker, outcome)

    @override
    def raised(self, worker: str, outcome: Outcome) -> None:
        self.report(worker, outcome)

    @override
    def lost(self, worker: str, node: str, failure: Failure) -> None:
        reason = death_of(node)
        if reason is None:
            self.driver.failed(worker, failure)
        else:
            self._lose(node, reason)

    def _withdraw_late(self, worker: str) -> bool:
        """Take back a worker that Ray could not place, because others took its room; all, if the rest is too few."""
        withdrawn = self._withdrawal.of(worker, has_state=self.driver.has_formed)
        nodes = {self._actors.node_of(each) for each in withdrawn}
        for each in withdrawn:
            self._actors.kill(each)
        for node in nodes:  # before the driver looks for places of others
            count = self._actors.count(node)
            self._discovery.withdraw(node, count)
            self.driver.limit_slots(self._names.name(node) or "", count)
        for each, text in withdrawn.items():
            self.driver.withdraw(each, text)
        return bool(withdrawn)

    def _found(self, slots: Mapping[str, int]) -> None:
        named = self._names.slots(slots)
        for name in self._known - named.keys():
            node = self._names.node(name)
            reason = death_of(node)
            if reason is not None:
                self._lose(node, reason)
        self._known = set(named)
        self.driver.found(named)
        self._hear_of_departures()

    def _hear_of_departures(self) -> None:
        """Ray has announced when nodes will be gone, such as at a preemption: their workers hand over before."""
        for node, seconds in self._departures.news().items():
            name = self._names.name(node)
            if name is not None:
                self.driver.leaves_in(seconds, name)

    def _lose(self, node: str, reason: str) -> None:
        self._actors.lose(node)
        name = self._names.name(node)
        if name is not None:
            self._known.discard(name)
            self.driver.host_lost(name, reason)

    def _look_again(self) -> None:
        if self._demand is not None:
            self._demand.update(self._actors.shares())
        self._hear_of_departures()
        self._loop.after(LOOK_S, self._look_again)

    def _explain_wait(self) -> None:
        if not self.driver.members:
            logger.warning("%s\n  waiting up to %g s for it (elastic_timeout)", self._shortage(), self._limits.timeout)
            self._loop.after(REMIND_S, self._explain_wait)

    def _shortage(self) -> str:
        return self._room.shortage(self._limits.least)

    def _explained(self, error: ExecutorError) -> ExecutorError:
        """The error of a job that never had enough workers says what the cluster lacks."""
        return error if self.driver.members else PlacementError(f"{error}\n{self._shortage()}")


def _room_and_limits(options: ElasticOptions, limits: Limits) -> tuple[Room, Limits]:
    """The room of a job, which starts with no more workers than a placement group can hold."""
    room: ClusterRoom | GroupRoom = room_of(options.shape, options.use_current_group)
    if isinstance(room, GroupRoom):
        limits = replace(limits, size=room.check(limits.least, limits.size))
    return room, limits
