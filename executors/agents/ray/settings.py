"""How a job on Ray is started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ray.runtime_env import RuntimeEnv

from executors.dashboard.picture import Address
from executors.job.arguments import check_integer, check_seconds, check_variables, interface_names
from executors.job.discovery import HostDiscovery
from executors.job.elastic_arguments import ElasticArguments, ResetLimit, resolve_limits
from executors.membership import Limits


@dataclass(slots=True)
class MiniSettings:
    """The result of :meth:`RayExecutor.create_settings`; what is set later counts from the next start.

    ``timeout_s`` bounds the start of the workers, ``placement_group_timeout_s`` the wait for free resources. ``nics``
    are the network interfaces to use; empty means any. ``discovery`` is for an elastic job with
    ``override_discovery=False``. RayExecutor sets ``elastic`` and ``dashboard``. ``verbose``, ``ssh_port`` and
    ``ssh_identity_file`` are Horovod's and have no use: Ray starts the workers, and the levels of ``logging`` choose
    what is logged. Setting a value that cannot be used raises ValueError.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    ssh_identity_file: str | None = None
    nics: tuple[str, ...] = ()
    discovery: HostDiscovery | None = None
    verbose: int = 1
    ssh_port: int | None = None
    elastic: bool = False
    dashboard: Address | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("timeout_s", "placement_group_timeout_s"):
            value = check_seconds(value, name)
        if name == "nics":
            value = interface_names(value)
        object.__setattr__(self, name, value)

    @property
    def start_timeout(self) -> float:
        """Horovod's name of ``timeout_s``."""
        return self.timeout_s


def save_ssh_key(text: str, path: str) -> None:
    """Write ``text`` to ``path``, readable by the owner only. A file that is there already stays as it is."""
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def check_extra(variables: Mapping[str, object] | None) -> dict[str, str]:
    """The user's variables, numbers and paths as strings. Raises ValueError for others, and for the executor's own."""
    if isinstance(variables, Mapping):
        variables = {
            name: str(value) if isinstance(value, Real | os.PathLike) else value for name, value in variables.items()
        }
    return check_variables(variables, "extra_env_vars", "RayExecutor")


def check_runtime_env(given: object) -> Mapping[str, Any] | None:
    """The runtime environment of the workers. Raises ValueError where Ray does not take it, or for our variables."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f'runtime_env is {given!r}, but must be a dict of Ray\'s, such as {{"pip": ["lightning"]}}')
    unknown = sorted(set(map(str, given)) - RuntimeEnv.known_fields)
    if unknown:
        raise ValueError(
            f"runtime_env has {', '.join(unknown)}, but its fields are {', '.join(sorted(RuntimeEnv.known_fields))}"
        )
    check_variables(given.get("env_vars"), "runtime_env['env_vars']", "RayExecutor")
    try:
        return RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"runtime_env is {given!r}, which Ray does not take: {error}") from error


@dataclass(frozen=True, slots=True)
class ElasticRequest:
    """What a user may say about the workers of an elastic job; None: the default of it.

    ``num_workers`` start, by default the fewest; ``min_workers`` are the fewest that go on, by default as many as
    start; ``max_workers`` the most, by default as many as the cluster has room for.
    """

    num_workers: int | None = None
    min_workers: int | None = None
    max_workers: int | None = None
    reset_limit: ResetLimit = None
    cooldown_range: Sequence[float] | None = None
    elastic_timeout: float | None = None
    override_discovery: bool = True

    @property
    def is_elastic(self) -> bool:
        """Whether the user asked for workers that may change."""
        return self.min_workers is not None or self.max_workers is not None

    def limits(self) -> Limits:
        """The limits of the job. Raises ValueError for values that make no sense."""
        counts = {
            name: check_integer(value, name, 1)
            for name in ("min_workers", "num_workers", "max_workers")
            if (value := getattr(self, name)) is not None
        }
        if set(counts) == {"max_workers"}:
            raise ValueError(
                f"max_workers is {self.max_workers}, but the fewest workers are unknown: give min_workers as well, the "
                "number with which the training starts and goes on"
            )
        if list(counts.values()) != sorted(counts.values()):
            given = ", ".join(f"{name} is {count}" for name, count in counts.items())
            raise ValueError(f"{given}: give min_workers <= num_workers <= max_workers")
        arguments = ElasticArguments(
            self.min_workers, self.max_workers, self.reset_limit, self.elastic_timeout, self.cooldown_range, True
        )
        return resolve_limits(self.num_workers, arguments)

    def check_shape(self, arguments: Mapping[str, object]) -> None:
        """Raise ValueError for arguments of RayExecutor that place a fixed number of workers."""
        defaults = {"num_hosts": None, "placement_strategy": None, "bundle_label_selector": None}
        given = [f"{name} is {arguments[name]!r}" for name, default in defaults.items() if arguments[name] != default]
        if arguments["num_workers_per_host"] not in (None, 1):
            given.append(f"num_workers_per_host is {arguments['num_workers_per_host']!r}")
        if given:
            raise ValueError(
                f"{' and '.join(given)}, but the workers of an elastic job go where there is room: leave "
                f"{'it' if len(given) == 1 else 'them'} out; label_selector names the labels of their nodes"
            )

    def discovery(self, settings: MiniSettings) -> HostDiscovery | None:
        """What finds the nodes; None for the whole cluster. Raises ValueError where the user named none."""
        if self.override_discovery:
            return None
        if not hasattr(settings.discovery, "find_available_hosts_and_slots"):
            raise ValueError(
                f"override_discovery is False, but the discovery of the settings is {settings.discovery!r}: give "
                "create_settings(discovery=...) an object with a method find_available_hosts_and_slots()"
            )
        return settings.discovery

    def check_static(self) -> None:
        """Raise ValueError for an argument of elastic jobs in one that is not."""
        names = ("reset_limit", "cooldown_range", "elastic_timeout")
        given = [name for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{', '.join(given)}: this is for elastic jobs; give min_workers as well")
