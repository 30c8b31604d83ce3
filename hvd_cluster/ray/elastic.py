"""Horovod's older names for elastic jobs on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors import ExecutorError, HostDiscovery, ResetLimit, interface_names
from executors.agents.ray import Callback, MiniSettings, RayHostDiscovery
from hvd_cluster.ray.executor import RayExecutor

__all__ = ["ElasticRayExecutor", "ElasticSettings", "RayHostDiscovery"]


@dataclass(slots=True)
class ElasticSettings:
    """The result of :meth:`ElasticRayExecutor.create_settings`; what is set before the executor is made counts.

    The fields are arguments of :class:`RayExecutor`, and fields of its settings.
    """

    min_num_proc: int = 1
    max_num_proc: int | None = None
    reset_limit: ResetLimit = None
    elastic_timeout: float | None = None
    cooldown_range: Sequence[float] | None = None
    timeout_s: float = 30
    ssh_identity_file: str | None = None
    nics: tuple[str, ...] = ()
    discovery: HostDiscovery | None = None
    verbose: int = 1
    ssh_port: int | None = None


class ElasticRayExecutor:
    """An elastic job on Ray by Horovod's older names; :class:`RayExecutor` with ``min_workers`` is the same.

    ``override_discovery=False`` uses ``settings.discovery``. Raises ValueError for numbers that make no sense.
    """

    @classmethod
    def create_settings(
        cls,
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: ResetLimit = None,
        elastic_timeout: float | None = None,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Iterable[str] | str | None = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **kwargs: Any,
    ) -> ElasticSettings:
        """How a job is started; ``min_np`` and ``max_np`` are old names. Other arguments are fields of the result.

        Raises TypeError for an unknown argument, ValueError for values that cannot be used.
        """
        settings = ElasticSettings(
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            reset_limit=reset_limit,
            elastic_timeout=elastic_timeout,
            timeout_s=timeout_s,
            ssh_identity_file=ssh_identity_file,
            nics=interface_names(nics),
            **kwargs,
        )
        _executor(settings, False, 1, None, True)
        return settings

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, Any] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if not isinstance(settings, ElasticSettings):
            raise ValueError(
                f"settings is {settings!r}, but must be the result of ElasticRayExecutor.create_settings()"
            )
        self._variables = env_vars
        self._executor = _executor(settings, use_gpu, cpus_per_slot, gpus_per_slot, override_discovery)
        self._is_started = False

    def start(self) -> None:
        """Prepare :meth:`run`. Raises ExecutorError without ``ray.init()``, and ValueError for impossible variables."""
        if not self._is_started:
            self._executor.start(extra_env_vars=self._variables)
            self._is_started = True

    def run(self, worker_fn: Callable[[], Any], callbacks: Sequence[Callback] | None = None) -> list[Any]:
        """Call ``worker_fn()`` on every worker; see :meth:`RayExecutor.run`."""
        if not self._is_started:
            raise ExecutorError("the executor is not running; call start() first")
        return self._executor.run(worker_fn, callbacks=callbacks)


def _executor(
    settings: ElasticSettings, use_gpu: bool, cpus: int, gpus: int | None, override_discovery: bool
) -> RayExecutor:
    return RayExecutor(
        MiniSettings(
            settings.timeout_s,
            ssh_identity_file=settings.ssh_identity_file,
            nics=settings.nics,
            discovery=settings.discovery,
        ),
        cpus_per_worker=cpus,
        use_gpu=use_gpu,
        gpus_per_worker=gpus,
        min_workers=settings.min_num_proc,
        max_workers=settings.max_num_proc,
        reset_limit=settings.reset_limit,
        cooldown_range=settings.cooldown_range,
        elastic_timeout=settings.elastic_timeout,
        override_discovery=override_discovery,
    )
