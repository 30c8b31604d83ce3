"""The backends of Ray Train: a job for each of its worker groups.

Ray Train calls them in the process of its controller, which starts, watches and restarts the workers: all of a group,
or only those that have failed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError
from ray.train.backend import Backend, BackendConfig

# Ray has no public names for the failures of a start that it tries again, and for what it replaces.
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.worker_group.execution_group import ReplicaGroup

from collectives import override
from executors.agents.ray.metrics import export_metrics
from executors.agents.ray.placement.nodes import NodePlace
from executors.agents.ray.train.last_report import Deliveries
from executors.agents.ray.train.replacement import Replacement
from executors.agents.ray.worker import Location, here, server_host, variables_of
from executors.api import counted
from executors.job.job import Job
from executors.job.worlds import slots_of

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

START_S = 60.0
LOST = "ended"


@dataclass(frozen=True)
class JobConfig(BackendConfig):
    """How the jobs of a trainer are made: ``nics`` are the network interfaces to use.

    Each worker calls ``before``, and then the training function within the context manager that ``around`` makes. If
    they are ``elastic``, a worker that fails is replaced, and the others stay.
    """

    nics: tuple[str, ...] = ()
    elastic: bool = False
    before: tuple[Callable[[], object], ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    @override
    def backend_cls(self) -> type[Backend]:
        return ReplacingBackend if self.elastic else JobBackend

    @property
    @override
    def train_func_context(self) -> Callable[[], AbstractContextManager[object]]:
        return self.around

    @override
    def to_dict(self) -> dict[str, Any]:
        return {"nics": list(self.nics), "elastic": self.elastic}


class JobBackend(Backend):
    """Gives each worker of a group its rank, and runs the rendezvous server from the group's start to its end.

    The server ends with this process, too: an aborted controller exits without a call of :meth:`on_shutdown`.
    """

    def __init__(self) -> None:
        # Stays empty in the process of the user, which pickles this object for the controller.
        self._job: ExitStack | None = None

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """Start a job, and tell the workers, whose ranks are those of Ray Train.

        Raises WorkerGroupStartupFailedError if they do not answer in time, RayActorError if one is lost: Ray Train then
        starts the group again, as often as ``FailureConfig(controller_failure_limit=...)`` says.
        """
        # Ray Train tells nobody about the end of a group that has failed while it started.
        self._end()
        assert isinstance(backend_config, JobConfig)
        locations = _all(worker_group.execute_async(here))
        with ExitStack() as stack:
            environments = self._environments(worker_group, locations, stack)
            placed = variables_of(locations, backend_config.nics)
            _enter(worker_group, [place | own for place, own in zip(placed, environments, strict=True)], backend_config)
            self._job = stack.pop_all()

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """End the job. Ray Train kills the workers after this, and those that wait for others do not matter."""
        self._end()

    def _environments(
        self, group: BaseWorkerGroup, locations: Sequence[Location], stack: ExitStack
    ) -> list[dict[str, str]]:
        """Start a job, which ends with ``stack``: the variables of its ranks."""
        slots = slots_of([location.node for location in locations])
        job = stack.enter_context(Job(len(slots), server_host(locations)))
        return [job.environment(slot) for slot in slots]

    def _end(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()


class ReplacingBackend(JobBackend):
    """Also lets Ray Train replace workers that fail: their successors come into the job, and the others stay.

    Ray Train does so where a backend has replica groups, a way that was made for torchft. Ray Train's ranks are the
    places of workers. It calls this with a group of one worker for each that it replaces.
    """

    has_replica_groups = True

    def __init__(self) -> None:
        super().__init__()
        self._replacement: Replacement | None = None
        self._locations: list[Location] = []

    def on_start(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """Start a job, or let a successor into it. Raises as :meth:`JobBackend.on_start`."""
        if not isinstance(worker_group, ReplicaGroup) or self._replacement is None:
            super().on_start(worker_group, backend_config)
            return
        assert isinstance(backend_config, JobConfig)
        place, [location] = _place(worker_group), _all(worker_group.execute_async(here))
        self._locations[place] = location
        environment = self._replacement.succeed(place, _host(location))
        _enter(worker_group, [variables_of(self._locations, backend_config.nics)[place] | environment], backend_config)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """End the job, or note the loss of a worker."""
        if not isinstance(worker_group, ReplicaGroup):
            super().on_shutdown(worker_group, backend_config)
        elif self._replacement is not None:
            self._replacement.lose(_place(worker_group), LOST)

    def _environments(
        self, group: BaseWorkerGroup, locations: Sequence[Location], stack: ExitStack
    ) -> list[dict[str, str]]:
        # A successor may come on any node.
        job = stack.enter_context(Job(len(locations), ray.util.get_node_ip_address()))
        self._replacement = stack.enter_context(Replacement(job, list(map(_host, locations))))
        Deliveries.listener = self._replacement.delivered
        self._locations = list(locations)
        return self._replacement.environments()


def _host(location: Location) -> str:
    return NodePlace(location.node, location.hostname, location.address).name


def _place(group: ReplicaGroup) -> int:
    [worker] = group.get_workers()
    assert worker.distributed_context is not None
    return int(worker.distributed_context.world_rank)


def _enter(group: BaseWorkerGroup, environments: Sequence[Mapping[str, str]], config: JobConfig) -> None:
    _all([group.execute_single_async(i, enter, each, config.before) for i, each in enumerate(environments)])


def enter(environment: Mapping[str, str], before: Sequence[Callable[[], object]]) -> None:
    """Runs in each worker."""
    os.environ.update(environment)
    export_metrics()
    for call in before:
        call()


def _all(references: list[Any]) -> list[Any]:
    try:
        return ray.get(references, timeout=START_S)
    except GetTimeoutError as error:
        raise WorkerGroupStartupFailedError(
            f"{counted(len(references), 'worker')} of Ray Train did not all answer within {START_S:g} s; a node may "
            "have been lost, or may be overloaded"
        ) from error
