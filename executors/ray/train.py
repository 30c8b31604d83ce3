"""The backend of Ray Train: a job for each of its worker groups.

Ray Train calls it in the process of its controller, which starts, watches and restarts the workers.
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

# Ray has no public name for the failures of a start that it tries again.
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

from executors.counted import counted
from executors.job import Job
from executors.placement import slots_of
from executors.ray.metrics import export_metrics
from executors.ray.worker import here, server_host, variables_of

if TYPE_CHECKING:
    from ray.train._internal.base_worker_group import BaseWorkerGroup

__all__ = ["JobBackend", "JobConfig"]

START_S = 60.0


@dataclass(frozen=True)
class JobConfig(BackendConfig):
    """How the jobs of a trainer are made: ``nics`` are the network interfaces to use.

    Each worker calls ``before``, and then the training function within the context manager that ``around`` makes.
    """

    nics: tuple[str, ...] = ()
    before: tuple[Callable[[], object], ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def backend_cls(self) -> type[Backend]:
        """See :class:`ray.train.backend.BackendConfig`."""
        return JobBackend

    @property
    def train_func_context(self) -> Callable[[], AbstractContextManager[object]]:
        """See :class:`ray.train.backend.BackendConfig`."""
        return self.around

    def to_dict(self) -> dict[str, Any]:
        """See :class:`ray.train.backend.BackendConfig`."""
        return {"nics": list(self.nics)}


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
        self._job = _start(worker_group, backend_config)

    def on_shutdown(self, worker_group: BaseWorkerGroup, backend_config: BackendConfig) -> None:
        """End the job. Ray Train kills the workers after this, and those that wait for others do not matter."""
        self._end()

    def _end(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.close()


def _start(group: BaseWorkerGroup, config: JobConfig) -> ExitStack:
    locations = _all(group.execute_async(here))
    slots = slots_of([location.node for location in locations])
    placed = variables_of(locations, config.nics)
    with ExitStack() as stack:
        job = stack.enter_context(Job(len(slots), server_host(locations)))
        environments = [{**place, **job.environment(slot)} for place, slot in zip(placed, slots, strict=True)]
        _all(
            [
                group.execute_single_async(rank, enter, environment, config.before)
                for rank, environment in enumerate(environments)
            ]
        )
        return stack.pop_all()


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
