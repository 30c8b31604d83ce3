"""How a job on Ray is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from ray.runtime_env import RuntimeEnv

from executors.arguments import check_seconds, check_variables, interface_names
from executors.dashboard.address import Address
from executors.discovery import HostDiscovery

__all__ = ["MiniSettings", "check_extra", "check_runtime_env", "save_ssh_key"]


@dataclass(slots=True)
class MiniSettings:
    """The result of :meth:`RayExecutor.create_settings`; what is set later counts from the next start.

    ``timeout_s`` bounds the start of the workers, ``placement_group_timeout_s`` the wait for free resources. ``nics``
    are the network interfaces to use; empty means any. ``discovery`` is for an elastic job with
    ``override_discovery=False``. RayExecutor sets ``elastic`` and ``dashboard``. ``verbose``,
    ``ssh_port`` and ``ssh_identity_file`` are Horovod's and have no use: Ray starts the workers, and the levels of
    ``logging`` choose what is logged. Setting a value that cannot be used raises ValueError.
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
