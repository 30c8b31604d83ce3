"""Distributed training on a Ray cluster.

::

    settings = RayExecutor.create_settings(timeout_s=30)
    with RayExecutor(settings, num_workers=4) as executor:
        losses = executor.run(train)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from executors.api import ExecutorError
from executors.arguments import interface_names
from executors.call import Call
from executors.ray.call import store
from executors.ray.connection import check_connection
from executors.ray.job import RayJob
from executors.ray.request import Request
from executors.ray.settings import MiniSettings, check_extra, save_ssh_key
from hvd_cluster import horovod

if TYPE_CHECKING:
    # At run time executors.ray is imported first, because its error tells how to install Ray.
    from ray import ObjectRef

__all__ = ["MiniSettings", "RayExecutor"]


class RayExecutor:
    """A fixed number of workers, each a Ray actor with a rank.

    Give either ``num_workers``, packed on as few hosts as possible, or ``num_hosts``, different hosts with
    ``num_workers_per_host`` workers each. A worker gets ``cpus_per_worker`` CPUs and, with ``use_gpu``,
    ``gpus_per_worker`` GPUs (1 when left out). Inside a placement group the workers go there, unless
    ``use_current_placement_group`` is False. Raises ValueError for numbers that make no sense.

    Use it as a context manager, or call :meth:`start` and :meth:`shutdown`. It is not thread-safe.
    """

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
    ) -> None:
        if not isinstance(settings, MiniSettings):
            raise ValueError(f"settings is {settings!r}, but must be the result of RayExecutor.create_settings()")
        self._settings = settings
        self._use_current_group = use_current_placement_group
        self._request = Request(num_workers, num_hosts, num_workers_per_host, cpus_per_worker, use_gpu, gpus_per_worker)
        self._job: RayJob | None = None

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | str | None = None,
    ) -> MiniSettings:
        """How a job is started.

        ``placement_group_timeout_s`` limits the wait for free resources; the workers then have ``timeout_s`` seconds to
        come up. ``nics`` are the network interfaces to use. ``ssh_str`` is written to ``ssh_identity_file``, for the
        owner only, where both are given and there is no such file yet; neither has another use. Raises ValueError for
        values that cannot be used.
        """
        settings = MiniSettings(timeout_s, placement_group_timeout_s, ssh_identity_file, interface_names(nics))
        if ssh_str and ssh_identity_file:
            save_ssh_key(ssh_str, ssh_identity_file)
        return settings

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers with ``extra_env_vars`` in their environment, and make one ``executable_cls`` in each.

        Raises PlacementError when the workers do not fit, StartTimeoutError when they do not come up in time,
        WorkerError when one dies, ValueError for variables that the executor itself sets, TypeError for what cannot be
        pickled, ExecutorError without ``ray.init()``, when started already, or when a node cannot start a worker, and
        what the constructor of ``executable_cls`` raises. Nothing is left behind then.
        """
        if self._job is not None:
            raise ExecutorError("the executor was started already; call shutdown() before start()")
        check_connection()
        variables = check_extra(extra_env_vars)
        building = store(Call.of(executable_cls, executable_args, executable_kwargs)) if executable_cls else None
        job = RayJob(self._request, self._settings, self._use_current_group, variables)
        _set_up(job, building)
        self._job = job

    def run(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker; the values are in the order of the ranks.

        Raises a worker's exception as itself, with a RemoteError that holds rank and traceback as its cause;
        WorkerError within seconds when a worker dies; TypeError when ``fn`` or an argument cannot be pickled;
        ExecutorError when the executor is not running. After a death, after Ctrl-C, and when an exception of one worker
        leaves others hanging for more than a few seconds, all workers are killed: shut down and start again.
        """
        return self._call("run", Call.of(fn, args, kwargs))

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[ObjectRef[Any]]:
        """Like :meth:`run`, but returns one ObjectRef per rank at once.

        ``ray.get`` gives the values, and raises Ray's errors. The workers are not watched: when one dies, the
        others stay as they are until :meth:`shutdown`.
        """
        job = self._running()
        return job.submit(store(Call.of(fn, args, kwargs)))

    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(executable)`` on every worker; None stands for the executable where there is none.

        Raises as :meth:`run` does.
        """
        return self._call("execute", Call.of(fn))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0. Raises as :meth:`run` does."""
        [value] = self._call("execute", Call.of(fn), ranks=1)
        return value

    def shutdown(self) -> None:
        """End the workers and give their resources back. May be called at any time; :meth:`start` works again then."""
        job, self._job = self._job, None
        if job is not None:
            job.close()

    def __enter__(self) -> RayExecutor:
        """Start, unless :meth:`start` was called before."""
        if self._job is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _call(self, method: str, call: Call, ranks: int | None = None) -> list[Any]:
        job = self._running()
        return job.call(method, store(call), ranks)

    def _running(self) -> RayJob:
        if self._job is None:
            raise ExecutorError("the executor is not running; call start() first, or use it in a with block")
        self._job.check()
        return self._job


def _set_up(job: RayJob, building: ObjectRef[Call] | None) -> None:
    try:
        if horovod.is_requested():
            job.call("run", store(Call.of(horovod.install)))
        if building:
            job.call("build", building)
    except BaseException:
        job.close()
        raise
