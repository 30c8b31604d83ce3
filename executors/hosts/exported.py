"""Pure: the variables of this process that workers on other hosts get, too."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["exported"]

NAME = re.compile("[A-Za-z_][A-Za-z0-9_]*")
PRIVATE = frozenset(
    ["_", "DISPLAY", "HOME", "HOSTNAME", "LOGNAME", "OLDPWD", "PWD", "SHELL", "SHLVL", "TERM", "TMPDIR", "USER"]
)
PRIVATE_PREFIXES = ("BASH_FUNC", "DBUS_", "SSH_", "XDG_")
"""They describe the session of the user on one host."""
DEVICES = "VISIBLE_DEVICES"
"""The end of the names of variables that list devices of one host: those of CUDA, of ROCm..."""


def exported(environment: Mapping[str, str]) -> dict[str, str]:
    """All variables of ``environment`` that a shell can set, but those of this host: of its devices, of its user."""
    return {name: value for name, value in environment.items() if NAME.fullmatch(name) and not _is_private(name)}


def _is_private(name: str) -> bool:
    return name in PRIVATE or name.startswith(PRIVATE_PREFIXES) or name.endswith(DEVICES)
