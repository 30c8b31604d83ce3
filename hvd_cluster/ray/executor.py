"""``RayExecutor``: functions on workers of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from executors import Address, Call, ExecutorError, HostDiscovery, ResetLimit, interface_names
from executors.agents.ray import (
    Callback,
    ElasticRequest,
    MiniSettings,
    RayRequest,
    Sharded,
    check_connection,
    check_extra,
    check_runtime_env,
    is_client,
    save_ssh_key,
)
from hvd_cluster.ray.workers import ElasticWorkers, FixedWorkers, Workers

if TYPE_CHECKING:
    # At run time executors.agents.ray is imported first, because its error tells how to install Ray.
    from ray import ObjectRef
    from ray.data import Dataset

__all__ = ["MiniSettings", "RayExecutor"]

NO_PAGE = (
    "the driver serves the live page, and a ray:// client is none: its job is driven from the cluster; leave dashboard "
    "out, or run the script on a node of the cluster"
)


class RayExecutor:
    """Workers, each a Ray actor with a rank: a fixed number, or, with ``min_workers``, as many as there are.

    *Fixed.* Give either ``num_workers``, packed on as few hosts as possible, or ``num_hosts``, different hosts with
    ``num_workers_per_host`` workers each. The workers live from :meth:`start` to :meth:`shutdown`.

    *Elastic.* ``min_workers`` are the fewest that the training goes on with, ``max_workers`` the most (None: as many
    as the cluster has room for); ``num_workers`` start, by default the fewest. Each :meth:`run` is a job with workers
    of its own. Nodes that come are used, and nodes that Ray drains are left, while it runs. ``reset_limit`` bounds the
    failures and resizes together, ``cooldown_range`` is the shortest and the longest time, in seconds, for which a node
    with a failed worker gets no new one (None: for ever), and ``elastic_timeout`` is how many seconds to wait for the
    fewest workers (600). ``override_discovery=False`` uses the ``discovery`` of the settings, which names nodes by id.

    Inside a placement group, fixed and elastic workers go there, unless ``use_current_placement_group`` is False.

    A worker gets ``cpus_per_worker`` CPUs, which may be a fraction, with ``use_gpu`` ``gpus_per_worker`` GPUs (1 when
    left out), and ``resources_per_worker``, amounts of Ray's resources by name ("memory" in bytes). ``runtime_env`` is
    Ray's environment for the processes of the workers. ``label_selector`` names labels that their nodes must have, as
    in Ray's selectors. For a fixed number, ``bundle_label_selector`` has one such dict for each worker, or, with
    ``num_hosts``, for each host, and ``placement_strategy``, one of Ray's, replaces PACK. With ``dashboard``, true
    or an address and port such as ``"0.0.0.0:8265"``, the driver serves a live page of the job and prints its link; not
    for a ``ray://`` client. Raises ValueError for arguments that contradict each other.

    Use it as a context manager, or call :meth:`start` and :meth:`shutdown`. It is not thread-safe.
    """

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int | None = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: ResetLimit = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float | None = None,
        override_discovery: bool = True,
        label_selector: Mapping[str, str] | None = None,
        bundle_label_selector: Sequence[Mapping[str, str]] | None = None,
        resources_per_worker: Mapping[str, float] | None = None,
        placement_strategy: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        dashboard: bool | str = False,
    ) -> None:
        if not isinstance(settings, MiniSettings):
            raise ValueError(f"settings is {settings!r}, but must be the result of RayExecutor.create_settings()")
        settings.dashboard = Address.of(dashboard)
        wanted = ElasticRequest(
            num_workers,
            min_workers,
            max_workers,
            reset_limit,
            cooldown_range,
            elastic_timeout,
            override_discovery,
        )
        share: dict[str, Any] = {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
            "resources_per_worker": resources_per_worker,
            "label_selector": label_selector,
            "runtime_env": check_runtime_env(runtime_env),
        }
        places: dict[str, Any] = {
            "num_hosts": num_hosts,
            "num_workers_per_host": num_workers_per_host,
            "placement_strategy": placement_strategy,
            "bundle_label_selector": bundle_label_selector,
        }
        if wanted.is_elastic:
            wanted.check_shape(places)
            self._workers: Workers = ElasticWorkers(
                wanted, RayRequest(1, **share), settings, use_current_placement_group
            )
        else:
            wanted.check_static()
            self._workers = FixedWorkers(
                RayRequest(num_workers, **places, **share), settings, use_current_placement_group
            )
        settings.elastic = wanted.is_elastic
        self._settings = settings
        self._is_started = False

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Iterable[str] | str | None = None,
        discovery: HostDiscovery | None = None,
    ) -> MiniSettings:
        """How a job is started; the fields of the result may be set later.

        ``placement_group_timeout_s`` limits the wait for free resources; the workers then have ``timeout_s`` seconds to
        come up. ``nics`` are the network interfaces to use. ``ssh_str`` is written to ``ssh_identity_file``, for the
        owner only, where both are given and there is no such file yet; neither has another use. ``discovery`` finds the
        nodes of an elastic job with ``override_discovery=False``. Raises ValueError for values that cannot be used.
        """
        settings = MiniSettings(
            timeout_s, placement_group_timeout_s, ssh_identity_file, interface_names(nics), discovery
        )
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

        Raises PlacementError, which is a TimeoutError, when the workers do not fit: 5 s after the last node came if no
        autoscaler can add others, else in the end; StartTimeoutError when they do not come up in time, WorkerError when
        one dies, ValueError for variables that the executor itself sets, TypeError for objects that cannot be pickled,
        ExecutorError without ``ray.init()``, when started already, or when a node cannot start a worker, and what the
        constructor of ``executable_cls`` raises. Nothing is left behind then. The workers of an elastic job come later,
        when :meth:`run` is called.
        """
        if self._is_started:
            raise ExecutorError("the executor was started already; call shutdown() before start()")
        check_connection()
        if self._settings.dashboard is not None and is_client():
            raise ExecutorError(NO_PAGE)
        variables = check_extra(extra_env_vars)
        build = Call.of(executable_cls, executable_args, executable_kwargs) if executable_cls else None
        self._workers.start(build, variables)
        self._is_started = True

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] | None = None,
        datasets: Mapping[str, Dataset] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every worker; the values are in the order of the ranks.

        ``datasets`` are datasets of Ray Data by name, whose rows are shared out among a fixed number of workers:
        :func:`hvd_cluster.ray.get_dataset_shard` gives each its part, and all parts have the same number of rows.

        Each of ``callbacks`` is called here, meanwhile, with each value that a worker gives to :func:`hvd_cluster.ray.
        log`. In an elastic job, the values are those of the world in which the first worker was done.

        Raises a worker's exception as itself, with a RemoteError that holds rank and traceback as its cause;
        TypeError when ``fn`` or an argument cannot be pickled; ExecutorError when the executor is not running.

        *Fixed:* WorkerError within seconds when a worker dies. After a death, after Ctrl-C, and when an exception of
        one worker leaves others hanging for more than a few seconds, all workers are killed: shut down and start again.
        *Elastic:* WorkerError when the job cannot go on after a loss, ExecutorError when too few workers are there for
        too long, and PlacementError when they never were; DiscoveryError when the nodes cannot be found; ValueError
        when the placement group of this task cannot hold the fewest.
        """
        workers, call, callbacks = self._running(), Call.of(fn, args, kwargs), _checked(callbacks)
        if datasets is not None:
            call = replace(call, function=Sharded(fn, workers.split(datasets)))
        return workers.call("run", call, callbacks)

    def run_remote(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> list[ObjectRef[Any]]:
        """Like :meth:`run`, but returns one ObjectRef per rank at once.

        ``ray.get`` gives the values, and raises Ray's errors. The workers are not watched: when one dies, the
        others stay as they are until :meth:`shutdown`. Raises NotImplementedError where the workers may change.
        """
        return self._running().submit(Call.of(fn, args, kwargs))

    def execute(self, fn: Callable[[Any], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call ``fn(executable)`` on every worker; None stands for the executable where there is none.

        ``callbacks`` and errors are those of :meth:`run`.
        """
        return self._running().call("execute", Call.of(fn), _checked(callbacks))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0.

        Raises as :meth:`run` does, and NotImplementedError where the workers may change.
        """
        return self._running().first(Call.of(fn))

    def shutdown(self) -> None:
        """End the workers and give their resources back. May be called at any time; :meth:`start` works again then."""
        if self._is_started:
            self._is_started = False
            self._workers.close()

    def __enter__(self) -> RayExecutor:
        """Start, unless :meth:`start` was called before."""
        if not self._is_started:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _running(self) -> Workers:
        if not self._is_started:
            raise ExecutorError("the executor is not running; call start() first, or use it in a with block")
        return self._workers


def _checked(callbacks: Sequence[Callback] | None) -> Sequence[Callback]:
    given = [] if callbacks is None else callbacks
    if not isinstance(given, Sequence) or not all(map(callable, given)):
        raise TypeError(f"callbacks is {callbacks!r}, but must be a list of functions that take a logged value")
    return given
