"""How a job on Ray is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from executors.arguments import check_seconds, check_variables, interface_names

__all__ = ["MiniSettings", "check_extra", "save_ssh_key"]


@dataclass(frozen=True, slots=True)
class MiniSettings:
    """The result of :meth:`RayExecutor.create_settings`.

    ``timeout_s`` bounds the start of the workers, ``placement_group_timeout_s`` the wait for free resources. ``nics``
    are the network interfaces to use; empty means any. ``ssh_identity_file`` is kept for compatibility and not used:
    Ray starts the workers.
    """

    timeout_s: float = 30
    placement_group_timeout_s: float = 100
    ssh_identity_file: str | None = None
    nics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("timeout_s", "placement_group_timeout_s"):
            check_seconds(getattr(self, name), name)
        interface_names(self.nics)


def save_ssh_key(text: str, path: str) -> None:
    """Write ``text`` to ``path``, readable by the owner only. A file that is there already stays as it is."""
    try:
        descriptor = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(text)


def check_extra(variables: Mapping[str, object] | None) -> dict[str, str]:
    """The user's variables, their values as strings. Raises ValueError for one that the executor sets."""
    if isinstance(variables, Mapping):
        variables = {name: str(value) for name, value in variables.items()}
    return check_variables(variables, "extra_env_vars", "RayExecutor")
