"""The workers of a RayExecutor: a fixed number for all calls, or those of an elastic job for each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from executors import Call, ExecutorError
from executors.agents.ray import (
    ActorWork,
    Callback,
    ClientJob,
    ElasticOptions,
    ElasticRequest,
    MiniSettings,
    RayJob,
    RayRequest,
    check_connection,
    is_client,
    run_elastic,
    run_elastic_by_remote_driver,
    split,
    store,
)
from hvd_cluster import horovod, numpy_for_mxnet
from hvd_cluster.core import basics

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.data import DataIterator, Dataset

__all__ = ["ElasticWorkers", "FixedWorkers", "Workers"]
numpy_for_mxnet.register()


class Workers(Protocol):
    """The interface that RayExecutor needs; its methods name their errors."""

    def start(self, build: Call | None, variables: Mapping[str, str]) -> None:
        """Begin, with ``variables`` for each worker and ``build`` as the call that makes the executable."""

    def call(self, method: str, call: Call, callbacks: Sequence[Callback]) -> list[Any]:
        """The values of ``method``, "run" or "execute", by rank."""

    def split(self, datasets: Mapping[str, Dataset]) -> Mapping[str, Sequence[DataIterator]]:
        """The part of each rank, by the name of the dataset."""

    def first(self, call: Call) -> Any:
        """The value of "execute" on rank 0 alone."""

    def submit(self, call: Call) -> list[ObjectRef[Any]]:
        """References to the values of "run" by rank."""

    def close(self) -> None:
        """Release everything."""


class FixedWorkers:
    """Actors of a :class:`RayJob`, or of a :class:`ClientJob`."""

    def __init__(self, request: RayRequest, settings: MiniSettings, use_current_group: bool) -> None:
        self._request = request
        self._settings = settings
        self._use_current_group = use_current_group
        self._started: RayJob | ClientJob | None = None

    def start(self, build: Call | None, variables: Mapping[str, str]) -> None:
        building = store(build) if build else None
        kind = ClientJob if is_client() else RayJob
        job = kind(self._request, self._settings, self._use_current_group, variables)
        _set_up(job, building)
        self._started = job

    def call(self, method: str, call: Call, callbacks: Sequence[Callback]) -> list[Any]:
        job = self._job()
        return job.call(method, store(call), callbacks=callbacks)

    def split(self, datasets: Mapping[str, Dataset]) -> Mapping[str, Sequence[DataIterator]]:
        return split(datasets, self._request.size)

    def first(self, call: Call) -> Any:
        job = self._job()
        [value] = job.call("execute", store(call), ranks=1)
        return value

    def submit(self, call: Call) -> list[ObjectRef[Any]]:
        job = self._job()
        return job.submit(store(call))

    def close(self) -> None:
        if self._started is not None:
            self._started.close()

    def _job(self) -> RayJob | ClientJob:
        if self._started is None:
            raise ExecutorError("the workers are not started; call start() first")
        self._started.check()
        return self._started


def _set_up(job: RayJob | ClientJob, building: ObjectRef[Call] | None) -> None:
    try:
        if horovod.is_requested():
            job.call("run", store(Call.of(horovod.install)))
        if building:
            job.call("build", building)
    except BaseException:
        job.close()
        raise


@dataclass(slots=True)
class ElasticWorkers:
    """Each call is a job of its own, with new workers of ``shape``.

    The constructor raises ValueError for arguments that contradict each other.
    """

    wanted: ElasticRequest
    shape: RayRequest
    settings: MiniSettings
    use_current_group: bool = True
    _build: ObjectRef[Call] | None = None
    _variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted.limits()
        self.wanted.discovery(self.settings)

    @property
    def options(self) -> ElasticOptions:
        """How to run a job now."""
        settings = self.settings
        discovery = self.wanted.discovery(settings)
        return ElasticOptions(
            self.shape,
            settings.timeout_s,
            settings.nics,
            self._variables,
            discovery,
            settings.dashboard,
            self.use_current_group,
        )

    def start(self, build: Call | None, variables: Mapping[str, str]) -> None:
        self._build = store(build) if build else None
        self._variables = variables

    def call(self, method: str, call: Call, callbacks: Sequence[Callback]) -> list[Any]:
        check_connection()
        work = ActorWork(
            store(call),
            executes=method == "execute",
            before=[store(Call.of(horovod.install))] if horovod.is_requested() else [],
            build=self._build,
            # A rank that is done tells the others so, before Ray ends its process.
            after=[store(Call.of(basics.shutdown))],
        )
        run = run_elastic_by_remote_driver if is_client() else run_elastic
        return run(work, self.wanted.limits(), self.options, callbacks)

    def split(self, datasets: Mapping[str, Dataset]) -> Mapping[str, Sequence[DataIterator]]:
        raise NotImplementedError("datasets are for a fixed number of workers; use num_workers alone")

    def first(self, call: Call) -> Any:
        raise NotImplementedError("execute_single() is for a fixed number of workers; use execute(), or num_workers")

    def submit(self, call: Call) -> list[ObjectRef[Any]]:
        raise NotImplementedError("run_remote() is for a fixed number of workers; use run(), or num_workers alone")

    def close(self) -> None:
        """Between two calls there is no worker."""
        self._build = None
